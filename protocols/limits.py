"""What a worker says of itself in `welcome`: what it accepts and what it serves."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from protocols.base import Many, Value
from protocols.scalars import Positive, Size, TokenId


class Limits(Value):
    """What the receiver accepts, and how results are sent. The sizes are bytes.

    max_frame: one ZeroMQ frame.
    max_message: all frames of a message.
    max_header: its first frame.
    max_nesting: depth of a `metadata`, `config`, chat message or tool schema, itself counted.
    max_blobs: frames after the header.
    max_groups: of one submit.
    max_trajectories: of one submit, and ids in any other list.
    max_metadata: one `metadata` or `config`, as msgpack.
    max_chat: one chat message or tool schema, as msgpack.
    max_context: tokens of a trajectory; 0 where nothing is known.
    chunk_bytes: a larger message is sent in chunks of this size.
    window_bytes: events sent and not yet acknowledged as received, per connection.
    result_bytes: records kept until acknowledged, all clients together.
    """

    max_frame: Size = 256 * 2**20
    max_message: Size = 512 * 2**20
    max_header: Size = 8 * 2**20
    max_nesting: Size = 16
    max_blobs: Size = 65536
    max_groups: Size = 4096
    max_trajectories: Size = 65536
    max_metadata: Size = 64 * 2**10
    max_chat: Size = 4 * 2**20
    max_context: Size = 0
    chunk_bytes: Annotated[Size, Field(ge=64)] = 2**20
    window_bytes: Size = 4 * 2**20
    result_bytes: Size = 2 * 2**30


class ModelInfo(Value):
    """The model served.

    architecture: as its config names it.
    dtype: of the weights served.
    vocab_size: rows of the head; ids are valid in [0, vocab_size), whatever the tokenizer knows.
    max_context: tokens of a trajectory at most.
    eos_ids: end a turn unless ignore_eos.
    tokenizer_hash: nil when the checkpoint has no tokenizer; stop strings are refused then.
    """

    architecture: str
    dtype: str
    vocab_size: Positive
    max_context: Positive
    eos_ids: Many[TokenId] = ()
    tokenizer_hash: str | None = None

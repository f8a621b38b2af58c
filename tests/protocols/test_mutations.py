"""Whatever bytes arrive, the outcome is a valid message or one typed refusal, and soon."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import pytest

from protocols import (
    Assembler,
    BadRequest,
    ErrorReply,
    Limits,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
    split,
)
from tests.protocols import samples
from tests.protocols.refused import refused

LIMITS = Limits(max_trajectories=64, max_groups=16, max_metadata=512, max_nesting=8, max_blobs=64)
SLOWEST_S = 0.05

NASTY: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.5, float("nan"), float("inf"), -1e308,
    "", "x" * 300, "5", "nan", "\x00", b"", b"5", [], [[]], {}, {"": ""}, {5: 6}, {"a": {5: 6}}, [0] * 100, ["a", "a"],
    msgpack.ExtType(1, b""), msgpack.ExtType(1, msgpack.packb([0, "<i4", [1]])),
    msgpack.ExtType(1, msgpack.packb([0, "<i4", [2**60, 2**60]])), msgpack.ExtType(1, msgpack.packb([-1, "|O", [-1]])),
    msgpack.ExtType(1, msgpack.packb([0, "<f4", ["1"]])), msgpack.ExtType(7, b"abc"), msgpack.Timestamp(1, 1),
)  # fmt: skip
BYTES: tuple[bytes, ...] = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01",
    b"\xdc\xff\xff" * 50, b"\x91" * 1200, b"\x81\xa1a" * 600, b"\xc1", b"\xd6\xff\x00\x00\x00\x00", b"\xc0", b"\x00",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xa1\xff", b"\xc7\x00\x01",
)  # fmt: skip


def corpus() -> list[list[bytes]]:
    messages = [encode(message) for message in (*samples.REQUESTS.values(), *samples.REPLIES.values())]
    parts = [packet.frames for packet in split(messages[-6], 300, number=1, message_id="7")]
    wrong = [frames for *_, frames in refused() if frames]
    return [[bytes(frame) for frame in frames] for frames in (*messages, *parts, *wrong)]


def mutate(rng: random.Random, corpus: list[list[bytes]]) -> list[bytes]:
    frames = list(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        rng.choice((_change_tree, _change_tree, _change_bytes, _change_frames))(rng, frames, corpus)
    return frames


def _change_tree(rng: random.Random, frames: list[bytes], _: list[list[bytes]]) -> None:
    """Another value, key or entry somewhere in the header."""
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
    except (ValueError, IndexError, TypeError):
        return
    places: list[tuple[Any, Any]] = []
    waiting = [header]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        places += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys]
    if not places:
        return
    holder, key = rng.choice(places)
    action = rng.randrange(4)
    if action == 0:
        holder.pop(key)
    elif action == 1 and isinstance(holder, dict):
        holder[rng.choice(("type", "id", "later", "", 7, "protocol"))] = holder.pop(key)
    elif action == 2:
        other, other_key = rng.choice(places)
        holder[key] = other[other_key]
    else:
        holder[key] = rng.choice(NASTY)
    try:
        frames[0] = msgpack.packb(header)
    except (ValueError, RecursionError):
        return


def _change_bytes(rng: random.Random, frames: list[bytes], _: list[list[bytes]]) -> None:
    """A frame with bytes flipped, inserted, removed, or cut."""
    if not frames:
        return
    index = rng.randrange(len(frames)) if rng.random() < 0.3 else 0
    frame = bytearray(frames[index])
    at = rng.randrange(len(frame) + 1)
    action = rng.randrange(5)
    if action == 0 and frame:
        frame[at % len(frame)] ^= 1 << rng.randrange(8)
    elif action == 1:
        frame[at:at] = rng.choice(BYTES)
    elif action == 2:
        del frame[at : at + rng.randrange(1, 9)]
    elif action == 3:
        del frame[at:]
    else:
        end = min(len(frame), at + 8)
        frame[at:end] = rng.choice(BYTES)
    frames[index] = bytes(frame)


def _change_frames(rng: random.Random, frames: list[bytes], corpus: list[list[bytes]]) -> None:
    """A frame lost, doubled, moved, or of another message."""
    foreign = rng.choice(rng.choice(corpus) or [b""])
    if not frames:
        frames.append(foreign)
        return
    index = rng.randrange(len(frames))
    action = rng.randrange(4)
    if action == 0:
        del frames[index]
    elif action == 1:
        frames.insert(index, frames[rng.randrange(len(frames))])
    elif action == 2:
        frames.insert(rng.randrange(len(frames)), frames.pop(index))
    else:
        frames[index] = foreign


Decode = Callable[[Sequence[bytes]], Reply | Request | None]


def decoders() -> tuple[Decode, ...]:
    return (
        lambda frames: decode_request(frames, LIMITS),
        lambda frames: decode_reply(frames, LIMITS),
        lambda frames: Assembler(LIMITS).feed(frames),
    )


def attempt(decode: Decode, frames: list[bytes]) -> tuple[Reply | Request | BadRequest | None, float]:
    """What came of it and the CPU seconds that it took."""
    start = time.thread_time()
    try:
        outcome: Reply | Request | BadRequest | None = decode(frames)
    except BadRequest as error:
        outcome = error
    return outcome, time.thread_time() - start


def run(count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    originals = corpus()
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        frames = mutate(rng, originals)
        for decode in decoders():
            outcome, seconds = attempt(decode, frames)
            if seconds > SLOWEST_S:
                # Once may be the garbage collector's turn; a slow decode is slow again.
                seconds = min(attempt(decode, frames)[1] for _ in range(3))
            assert seconds < SLOWEST_S, frames
            if isinstance(outcome, BadRequest):
                outcomes["refused"] += 1
                reply = encode(ErrorReply(id=outcome.request_id, error=outcome.failure()))
                assert isinstance(decode_reply(reply, LIMITS), ErrorReply)
                continue
            outcomes["valid"] += 1
            if outcome is not None:
                assert decode([bytes(frame) for frame in encode(outcome)]) in (outcome, None)
    return outcomes


def test_mutated_frames_cost_one_refusal_each() -> None:
    outcomes = run(5_000, seed=1)
    assert outcomes["refused"] > 5_000
    assert outcomes["valid"] > 100


@pytest.mark.stress
def test_many_mutated_frames_cost_one_refusal_each() -> None:
    assert run(100_000, seed=2)["refused"] > 100_000

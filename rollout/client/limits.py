"""What the client can refuse by name before a byte is sent: the limits that the worker's welcome announced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from protocols.errors import BadRequest, PromptTooLong
from protocols.fields import Group, Limits
from protocols.replies import Welcome


def check_groups(groups: Sequence[Group], welcome: Welcome) -> None:
    """Raises BadRequest or PromptTooLong, naming the group."""
    limits = welcome.limits
    if len(groups) > limits.max_groups:
        raise BadRequest(f"{len(groups)} groups are more than max_groups, {limits.max_groups}", field="groups")
    count = sum(len(group.trajectory_ids) for group in groups)
    if count > limits.max_trajectories:
        raise BadRequest(
            f"{count} trajectories are more than max_trajectories, {limits.max_trajectories}", field="groups"
        )
    for i, group in enumerate(groups):
        if group.messages is None:
            check_ids(group.prompt, welcome, f"groups[{i}].prompt")
        for field, value, name in _opaque(group):
            if value and (size := len(msgpack.packb(value))) > (limit := getattr(limits, name)):
                raise BadRequest(f"has {size} bytes, more than {name}, {limit}", field=f"groups[{i}].{field}")


def _opaque(group: Group) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Path, value and limit of each map that the wire does not interpret."""
    yield "metadata", group.metadata, "max_metadata"
    yield "environment.config", group.environment.config, "max_metadata"
    yield "template.options", group.template.options, "max_metadata"
    for field, maps in (("messages", group.messages or ()), ("tools", group.tools)):
        for k, value in enumerate(maps):
            yield f"{field}[{k}]", value, "max_chat"


def check_ids(ids: npt.NDArray[np.int32], welcome: Welcome, field: str) -> None:
    """ids: int32[L] of a prompt, L > 0. Raises BadRequest or PromptTooLong naming `field`."""
    vocab, context = welcome.model.vocab_size, welcome.model.max_context
    if len(ids) >= context:
        raise PromptTooLong(f"{len(ids)} tokens leave no room in the worker's --max-context, {context}", field=field)
    if ids.min() < 0 or ids.max() >= vocab:
        raise BadRequest(f"ids lie in [0, {vocab}), found {ids.min()} .. {ids.max()}", field=field)


def check_size(frames: Sequence[bytes | memoryview], limits: Limits) -> None:
    """Of an encoded message. A frame too large would cost the connection, not one reply. Raises BadRequest."""
    sizes = [len(frame) for frame in frames]
    for value, name, limit in (
        (sizes[0], "max_header", limits.max_header),
        (max(sizes), "max_frame", limits.max_frame),
        (sum(sizes), "max_message", limits.max_message),
    ):
        if value > limit:
            raise BadRequest(f"the message exceeds {name}: {value} bytes, the worker takes {limit}; split it")
    if len(sizes) - 1 > limits.max_blobs:
        raise BadRequest(
            f"the message exceeds max_blobs: {len(sizes) - 1} arrays, the worker takes {limits.max_blobs}; split it"
        )

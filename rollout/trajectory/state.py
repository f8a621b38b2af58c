"""What the tokens of a trajectory do not say, so that it can go on elsewhere: the state of its environment, and what
was said in its conversation.
"""

from __future__ import annotations

import logging
from typing import Any

import msgpack
import numpy as np
from pydantic import ValidationError

from protocols.base import Received
from protocols.fields import Group, Limits, Partial
from rollout.chat.messages import all_as_json
from rollout.environments.answer import End
from rollout.environments.bounded import Stops
from rollout.environments.guard import Guard
from rollout.trajectory.spec import TrajectorySpec
from rollout.trajectory.trajectory import Trajectory

log = logging.getLogger(__name__)

SNAPSHOT_BYTES = 64 * 2**10
"""Of an environment's state in a record, as msgpack: what the wire's `max_metadata` allows."""
SAID_BYTES = 16 * 2**10
"""Of what was said, as JSON, besides the bytes for each token that the trajectory may have."""
TOKEN_BYTES = 8
"""A token of ordinary text has about four."""


def state_bytes(group: Group, max_context: int) -> int:
    """Room that is reserved in a record of `group`; a state that takes more is not sent."""
    if group.environment.stateless:
        return 0
    if group.messages is None:
        return SNAPSHOT_BYTES
    return SNAPSHOT_BYTES + SAID_BYTES + TOKEN_BYTES * min(max_context, group.budget.max_total_tokens or max_context)


class State:
    """As it was after the last answer that is in the trajectory; at first as it was when the trajectory was cut.

    snapshot: of the environment, None where it needs none, or where it is not known.
    """

    def __init__(self, spec: TrajectorySpec, environment: Guard, max_context: int) -> None:
        self._name = spec.trajectory_id
        self._environment = environment
        self._room = state_bytes(spec.group, max_context) if spec.resumable else 0
        self._known = True
        self.snapshot = None if spec.partial is None else spec.partial.snapshot
        self._said = all_as_json(spec.said)

    async def keep(self, stops: Stops) -> End | None:
        """Called with an answer, before the trajectory takes it: one that is given up here changes nothing."""
        environment, snapshot, said = self._environment, None, self._said
        known = environment.stateless
        if self._room and environment.resumable:
            kept = await environment.kept(len(said or ()), stops)
            if isinstance(kept, End):
                return kept
            snapshot, more = kept
            said = None if said is None or more is None else (*said, *more)
            size = sum(map(len, said or ())) + (0 if snapshot is None else len(msgpack.packb(snapshot)))
            known = size <= self._room and _can_be_sent(snapshot)
            if not known:
                log.warning("%s: a state of %d bytes is too large or too deep to be sent", self._name, size)
        elif environment.talks:
            said = None
        self._known, self.snapshot, self._said = known, snapshot, said
        return None

    def partial(self, trajectory: Trajectory) -> Partial | None:
        """What it takes to go on from here. None: it is not known, or more than a record can hold."""
        if self._said is None or not (self._known or not trajectory.begun):
            return None
        said = np.frombuffer(b"[%s]" % b",".join(self._said), np.uint8) if self._said else None
        return trajectory.partial(self.snapshot, said)


def _can_be_sent(snapshot: dict[str, Any] | None) -> bool:
    """Does whoever receives it take it? A record that cannot be read would be lost, and nobody told of its end."""
    try:
        Partial.model_validate({"snapshot": snapshot}, context=Received((), Limits()))
    except ValidationError:
        return False
    return True

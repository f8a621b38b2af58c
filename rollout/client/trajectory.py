"""One ended trajectory as a trainer reads it: a view over the received record.

That its parts fit together was checked when it was decoded (`protocols.fields.Segment`, `Record`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from protocols.fields import (
    SOURCE_SAMPLED,
    Failure,
    Group,
    Partial,
    Purpose,
    Record,
    Sampling,
    Segment,
    Status,
    Times,
    TrajectoryReason,
    Truncation,
    Turn,
)
from rollout.client.errors import ClientClosed


class Trajectory:
    """All fields of `record` (`protocols.fields.Record`), and the arrays of its last segment.

    `token_ids` int32[L], `source` uint8[L], `logprobs` float32[L], `loss_mask` uint8[L]: whole sequence, no shift;
    `logprobs[i]` scores `token_ids[i]` given `token_ids[:i]`. Unless history was rewritten there is one segment.
    Arrays are read-only views of the received bytes: copy them before writing, or to keep a few tokens of a big
    result alive for long.

    `ack()` tells the worker that this result is safe here; by default the iterator that yielded it does so. A copy
    can be pickled to other processes, but only the original acknowledges.
    """

    __slots__ = ("_ack", "group", "record")

    def __init__(self, record: Record, ack: Callable[[str], None], group: Group | None = None) -> None:
        self.record = record
        self.group = group
        """As submitted."""
        self._ack = ack

    def __reduce__(self) -> tuple[type[Trajectory], tuple[Record, Callable[[str], None], Group | None]]:
        return Trajectory, (self.record, _acknowledge_elsewhere, self.group)

    def ack(self) -> None:
        """Let the worker forget this result. Repeating it does nothing."""
        self._ack(self.record.trajectory_id)

    @property
    def trajectory_id(self) -> str:
        return self.record.trajectory_id

    @property
    def group_id(self) -> str:
        return self.record.group_id

    @property
    def batch_id(self) -> str:
        return self.record.batch_id

    @property
    def sample_index(self) -> int:
        return self.record.sample_index

    @property
    def status(self) -> Status:
        return self.record.status

    @property
    def finish_reason(self) -> TrajectoryReason:
        return self.record.finish_reason

    @property
    def ok(self) -> bool:
        """Ended by itself or by a budget: `completed` or `truncated`."""
        return self.record.status in ("completed", "truncated")

    @property
    def resumable(self) -> bool:
        """Was it cut, and can it go on? Hand it to a later `submit(..., resume=[...])`."""
        return self.record.partial is not None

    @property
    def partial(self) -> Partial | None:
        """What a resumed one needs to go on; None for one that cannot."""
        return self.record.partial

    @property
    def retries(self) -> int:
        """Failed attempts before this one (`submit(max_retries=...)`)."""
        return self.record.retries

    @property
    def reward(self) -> float | None:
        return self.record.reward

    @property
    def rewards(self) -> dict[str, float]:
        return self.record.rewards

    @property
    def metadata(self) -> dict[str, Any]:
        return self.record.metadata

    @property
    def sampling(self) -> Sampling:
        """Every effective value of the law, the drawn seed included."""
        return self.record.sampling

    @property
    def error(self) -> Failure | None:
        return self.record.error

    @property
    def truncation(self) -> Truncation | None:
        return self.record.truncation

    @property
    def times(self) -> Times:
        return self.record.times

    @property
    def wall_s(self) -> float:
        return self.record.wall_s

    @property
    def purpose(self) -> Purpose:
        return self.record.purpose

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.record.segments

    @property
    def segment(self) -> Segment:
        """The last segment: the sequence as it stood when the trajectory ended."""
        return self.record.segments[-1]

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Turns of all segments, in order."""
        return tuple(turn for segment in self.record.segments for turn in segment.turns)

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        return self.segment.token_ids

    @property
    def source(self) -> npt.NDArray[np.uint8]:
        return self.segment.source

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        return self.segment.logprobs

    @property
    def loss_mask(self) -> npt.NDArray[np.uint8]:
        return self.segment.loss_mask

    @property
    def weight_versions(self) -> npt.NDArray[np.int64]:
        """int64[k, 2]: runs of (version, count) over the sampled tokens in order."""
        return self.segment.weight_versions

    @property
    def prompt_len(self) -> int:
        """Tokens before the first sampled turn of the last segment; all of them when nothing was sampled."""
        turns = self.segment.turns
        return turns[0].start if turns else len(self.segment.token_ids)

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]:
        return self.segment.token_ids[: self.prompt_len]

    @property
    def response_ids(self) -> npt.NDArray[np.int32]:
        """Everything after the first turn's prompt: sampled tokens, glue and observations."""
        return self.segment.token_ids[self.prompt_len :]

    @property
    def response_mask(self) -> npt.NDArray[np.uint8]:
        """1 where the token is to be trained on."""
        return self.segment.loss_mask[self.prompt_len :]

    @property
    def response_logprobs(self) -> npt.NDArray[np.float32]:
        """0.0 wherever the token was not sampled."""
        return self.segment.logprobs[self.prompt_len :]

    @property
    def token_versions(self) -> npt.NDArray[np.int64]:
        """int64[L]: the weight version that sampled each token of the last segment, -1 where none did."""
        versions = np.full(len(self.token_ids), -1, np.int64)
        runs = self.weight_versions
        versions[self.source == SOURCE_SAMPLED] = np.repeat(runs[:, 0], runs[:, 1])
        return versions

    @property
    def weight_version_min(self) -> int | None:
        """The oldest version that sampled a token of any segment; None when nothing was sampled."""
        return min((int(s.weight_versions[:, 0].min()) for s in self.segments if len(s.weight_versions)), default=None)

    @property
    def weight_version_max(self) -> int | None:
        return max((int(s.weight_versions[:, 0].max()) for s in self.segments if len(s.weight_versions)), default=None)

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.trajectory_id!r}, {self.status}, {self.finish_reason}, {len(self.token_ids)} tokens,"
            f" {len(self.turns)} turn(s), reward={self.reward})"
        )


def _acknowledge_elsewhere(trajectory_id: str) -> None:
    raise ClientClosed(f"{trajectory_id} is a copy: acknowledge the original, in the process that received it")

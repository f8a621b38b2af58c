"""The host's side of one request: what outlives its stay in a slot."""

from __future__ import annotations

import numpy as np

from engine.config import BLOCK_SIZE
from engine.request import (
    LOGPROB_MODES,
    BoolArray,
    Completion,
    Failure,
    FinishReason,
    FloatArray,
    IntArray,
    Request,
    Times,
)
from engine.scheduling.block_pool import block_key, root_key
from engine.scheduling.phases import PhaseTimes
from engine.scheduling.stop import StringMatcher


class Sequence:
    """A live request. While it holds a slot, its ids and logprobs are in the slot's rows (slots.py).

    ids: int32[n], every id known when it last had no slot. logprobs: float32[3, sampled so far], likewise.
    budget: sampled tokens at most; overflow: the budget was cut by the context limit, not by max_tokens.
    epoch, version: commit epoch and weight version at the last admission, hence those of the KV it holds.
    """

    def __init__(self, request: Request, arrival: int, max_context: int, times: PhaseTimes) -> None:
        self.request = request
        self.key = (request.order, arrival)
        self.times = times
        room = max_context - len(request.token_ids)
        self.budget = min(request.max_tokens, room)
        self.overflow = request.max_tokens > room
        self.slot: int | None = None
        self.ids: IntArray = request.token_ids
        self.logprobs: FloatArray = np.empty((3, 0), np.float32)
        self.top: list[tuple[IntArray, FloatArray]] = []
        self.scores: FloatArray | None = None
        self.num_scored = 0
        if request.prompt_logprobs:
            self.scores = np.full((3, self.prompt_len), np.nan, np.float32)
        self.matcher: StringMatcher | None = None
        self.epoch = -1
        self.version = 0
        self.kv_version: int | None = None
        self.version_runs: list[tuple[int, int]] = []
        self.cached_tokens: int | None = None
        self.computed_tokens = 0
        self.preemptions = 0
        self._keys: list[bytes] = []
        self._key_epoch = -1

    @property
    def prompt_len(self) -> int:
        return len(self.request.token_ids)

    @property
    def last_position(self) -> int:
        """Positions whose KV is needed: the last sampled token has none."""
        return self.prompt_len + self.budget - 1

    @property
    def started(self) -> bool:
        """Has it ever held a slot?"""
        return self.cached_tokens is not None

    @property
    def to_score(self) -> bool:
        """Do prompt positions remain to be scored? Then no prefix may be taken from the cache."""
        return self.scores is not None and self.num_scored < self.prompt_len

    def sampled_mask(self) -> BoolArray:
        """bool[len(ids)]: which of `ids` were sampled, in this turn or earlier ones."""
        mask = np.ones(len(self.ids), np.bool_)
        mask[: self.prompt_len] = False if self.request.sampled is None else self.request.sampled
        return mask

    def prefix_keys(self, count: int, epoch: int) -> list[bytes]:
        """Keys of the first `count` whole blocks of `ids` under the weights of `epoch`."""
        if self._key_epoch != epoch:
            self._keys, self._key_epoch = [], epoch
        keys, done, size = self._keys, len(self._keys), BLOCK_SIZE * self.ids.itemsize
        if done < count:
            ids = self.ids[done * BLOCK_SIZE : count * BLOCK_SIZE].tobytes()
            key = keys[-1] if keys else root_key(epoch)
            for at in range(0, len(ids), size):
                key = block_key(key, ids[at : at + size])
                keys.append(key)
        return keys[:count]

    def take_keys(self, earlier: Sequence) -> None:
        """What an earlier turn of its trajectory hashed need not be hashed again."""
        count = BLOCK_SIZE * len(earlier._keys)
        if np.array_equal(self.ids[:count], earlier.ids[:count]):
            self._keys, self._key_epoch = [*earlier._keys], earlier._key_epoch

    def preempted(self) -> None:
        """It has left its slot: note whose KV its tokens were sampled from; a score that was cut starts over."""
        self.preemptions += 1
        if self.kv_version is None and len(self.ids) > self.prompt_len:
            self.kv_version = self.version
        if self.to_score:
            self.num_scored = 0

    def add_scores(self, start: int, scores: FloatArray) -> bool:
        """Prompt logprobs float32[3, q] of the ids after positions [start, start + q).

        False if one that was asked for is NaN.
        """
        assert self.scores is not None
        first, last = start + 1, min(start + 1 + scores.shape[1], self.prompt_len)
        self.scores[:, first:last] = scores[:, : last - first]
        self.num_scored = start + scores.shape[1]
        asked = [LOGPROB_MODES.index(mode) for mode in self.request.logprob_modes]
        return not np.isnan(self.scores[asked, first:last]).any()

    def close_version_run(self, version: int, num_sampled: int) -> None:
        """Everything sampled since the last call was sampled under `version`."""
        runs = self.version_runs
        fresh = num_sampled - sum(count for _, count in runs)
        if fresh > 0:
            if runs and runs[-1][0] == version:
                fresh += runs.pop()[1]
            runs.append((version, fresh))

    def completion(
        self, reason: FinishReason, times: Times, *, stop: int | bytes | None = None, error: Failure | None = None
    ) -> Completion:
        """The end of this sequence, which has left its slot and closed its last version run."""
        request = self.request
        modes = {mode: LOGPROB_MODES.index(mode) for mode in request.logprob_modes}
        width = request.top_logprobs
        return Completion(
            request_id=request.id,
            finish_reason=reason,
            token_ids=self.ids[self.prompt_len :],
            logprobs={mode: self.logprobs[i].copy() for mode, i in modes.items()},
            weight_versions=tuple(self.version_runs),
            kv_version=self.version if self.kv_version is None else self.kv_version,
            cached_tokens=self.cached_tokens or 0,
            computed_tokens=self.computed_tokens,
            preemptions=self.preemptions,
            times=times,
            stop=stop,
            top_ids=np.array([ids for ids, _ in self.top], np.int32).reshape(-1, width) if width else None,
            top_logprobs=np.array([top for _, top in self.top], np.float32).reshape(-1, width) if width else None,
            prompt_logprobs=(
                {mode: self.scores[i].copy() for mode, i in modes.items()}
                if self.scores is not None and not self.to_score
                else None
            ),
            error=error,
        )

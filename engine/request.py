"""What goes into the engine and what comes out: `Request` in, one `Completion` out, always exactly one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
"""Slots, positions and counts: numpy indexes by int64 several times faster than by int32, one flat index at a time."""

LogprobMode = Literal["processed", "temperature", "raw"]
LOGPROB_MODES: tuple[LogprobMode, ...] = ("processed", "temperature", "raw")
"""Fixed order of the first axis of every `float32[3, ...]` logprob array in the engine."""

FinishReason = Literal[
    "stop", "length", "context_overflow", "turn_deadline", "abort_client", "abort_weight_update", "error"
]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The law one request is sampled from (docs/sampling.md), and the key of its noise.

    `temperature == 0` is greedy. `top_k == 0`, `top_p == 1`, `min_p == 0` and penalties of 1, 0, 0 are off.
    The noise of the token at absolute position p is a function of (seed, sample_index, segment, p) alone.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_ids: tuple[int, ...] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0
    sample_index: int = 0
    segment: int = 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a request ends before its budget.

    `ids` are exactly the ids that end it: whoever builds the request adds the checkpoint's EOS list, or not
    (`ignore_eos`). `strings` are UTF-8 bytes, matched over the bytes of the sampled tokens only.
    """

    ids: frozenset[int] = frozenset()
    strings: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One turn: continue `token_ids` by up to `max_tokens` sampled tokens.

    token_ids: int32[L], the whole running sequence (prompt, earlier sampled tokens, observations).
    sampled: bool[L] or None, which of `token_ids` were sampled in earlier turns (presence and frequency
        penalties count those; repetition counts all of `token_ids`). None means none.
    begun: so many of the last `token_ids` were sampled by this very turn, before it was cut: a stop string may begin in
        them.
    max_tokens: sampled tokens at most; 0 only together with `prompt_logprobs` (a score).
    order: start of the trajectory; smaller goes first, so that a returning turn precedes new trajectories.
    group: requests of one non-empty group share their prompt; siblings wait while the first one prefills.
    logprob_modes: which logprobs come back, the primary one first (it also scores the alternatives).
    top_logprobs: how many most likely alternatives come back for each sampled token.
    prompt_logprobs: score `token_ids` too; such a request reads no prefix hit.
    trajectory: key of the trajectory whose turn this is, if its turns are to be told as such.
    goes_on: a further turn of it may come. Its KV is then held from the end of this turn until that request starts,
        until `Engine.release_kv`, or until others need the blocks more.
    expected_wait: seconds until that turn, as far as known; those that take longest lose their KV first.
    """

    id: str
    token_ids: IntArray
    max_tokens: int
    params: SamplingParams = SamplingParams()
    stop: StopRule = StopRule()
    sampled: BoolArray | None = None
    order: int = 0
    group: str = ""
    logprob_modes: tuple[LogprobMode, ...] = ("processed",)
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    trajectory: str = ""
    goes_on: bool = False
    expected_wait: float = 0.0
    begun: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a request's life by what it waited for; they add up to its wall time in the engine."""

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    preempted: float = 0.0
    paused: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one request.

    token_ids: int32[n]; logprobs: mode -> float32[n] for each mode asked for.
    top_ids, top_logprobs: int32[n, k], float32[n, k] when asked for, best first.
    prompt_logprobs: mode -> float32[L] when asked for; entry 0 is NaN (nothing precedes it).
    weight_versions: (version, count) runs over `token_ids`. kv_version: oldest version whose KV was read.
    cached_tokens: prompt tokens that came from the prefix cache at first admission. computed_tokens: prompt tokens
        computed; what a preemption took away and made it compute again counts again.
    stop: the id or string that ended it, when finish_reason is "stop".
    error: set exactly when finish_reason is "error".
    """

    request_id: str
    finish_reason: FinishReason
    token_ids: IntArray
    logprobs: Mapping[LogprobMode, FloatArray]
    weight_versions: tuple[tuple[int, int], ...] = ()
    kv_version: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    times: Times = Times()
    stop: int | bytes | None = None
    top_ids: IntArray | None = None
    top_logprobs: FloatArray | None = None
    prompt_logprobs: Mapping[LogprobMode, FloatArray] | None = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as plain data, so that it can cross a process boundary."""

    code: str
    message: str
    field: str | None = None


def refusal(request: Request, failure: Failure) -> Completion:
    """The end of a request that the engine did not take, or will not finish: no tokens."""
    logprobs = dict.fromkeys(request.logprob_modes, np.empty(0, np.float32))
    return Completion(request.id, "error", np.empty(0, np.int32), logprobs, error=failure)

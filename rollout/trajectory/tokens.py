"""The tokens of one segment: parallel columns that only grow, and the `Segment` made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from engine.request import BoolArray, Completion, FloatArray, IntArray, LogprobMode, Request
from protocols.fields import SOURCE_PREFIX, SOURCE_PROMPT, SOURCE_SAMPLED, Segment, Turn

Scalar = TypeVar("Scalar", bound=np.generic)


class Tokens:
    """Ids with their source, logprobs and weight versions. `modes`: the logprobs kept, the primary one first."""

    def __init__(self, modes: tuple[LogprobMode, ...]) -> None:
        self._modes = modes
        self._ids = _Column(np.dtype(np.int32))
        self._source = _Column(np.dtype(np.uint8))
        self._sampled = _Column(np.dtype(np.bool_))
        self._any_sampled = False
        self._logprobs = {mode: _Column(np.dtype(np.float32)) for mode in modes}
        self._weight_versions: list[tuple[int, int]] = []
        self._kv_versions: list[tuple[int, int]] = []
        self._top: list[tuple[IntArray, FloatArray]] = []
        self._prompt_logprobs: FloatArray | None = None

    @property
    def length(self) -> int:
        return self._ids.length

    @property
    def ids(self) -> IntArray:
        """int32[L], read-only."""
        return self._ids.array()

    @property
    def logprobs(self) -> FloatArray:
        """float32[L] of the primary mode, read-only; 0.0 where not sampled."""
        return self._logprobs[self._modes[0]].array()

    @property
    def sampled(self) -> BoolArray | None:
        """bool[L], read-only: what presence and frequency penalties count. None where nothing is."""
        return self._sampled.array() if self._any_sampled else None

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token, None before the first one."""
        return min((version for version, _ in self._weight_versions), default=None)

    def add_prompt(self, ids: IntArray, source: npt.NDArray[np.uint8] | None) -> None:
        """Tokens of a resumed prompt that were sampled elsewhere count in the penalties and not in the loss."""
        if source is None:
            self.add(ids, SOURCE_PROMPT)
            return
        elsewhere = source == SOURCE_SAMPLED
        self._any_sampled = bool(elsewhere.any())
        self._extend(ids, np.where(elsewhere, np.uint8(SOURCE_PREFIX), source), elsewhere)

    def restore(self, segment: Segment) -> None:
        """Everything after the prompt, which is there already, of a segment that was cut."""
        begin = self.length
        source = segment.source[begin:]
        logprobs = {self._modes[0]: segment.logprobs[begin:]}
        logprobs |= {mode: array[begin:] for mode, array in segment.more_logprobs.items()}
        sampled = source == SOURCE_SAMPLED
        self._any_sampled |= bool(sampled.any())
        self._extend(segment.token_ids[begin:], source, sampled, logprobs)
        _add_runs(self._weight_versions, segment.weight_versions.tolist())
        _add_runs(self._kv_versions, segment.kv_versions.tolist())
        if segment.top_ids is not None and segment.top_logprobs is not None:
            self._top.append((segment.top_ids, segment.top_logprobs))
        self._prompt_logprobs = segment.prompt_logprobs

    def add(self, ids: IntArray, source: int) -> None:
        self._extend(ids, source, False)

    def add_sampled(self, completion: Completion) -> None:
        """`completion` has passed `fault`."""
        if count := len(completion.token_ids):
            self._any_sampled = True
            self._extend(completion.token_ids, SOURCE_SAMPLED, True, completion.logprobs)
        _add_runs(self._weight_versions, completion.weight_versions)
        _add_runs(self._kv_versions, [(completion.kv_version, count)])
        if completion.top_ids is not None and completion.top_logprobs is not None:
            self._top.append((completion.top_ids, completion.top_logprobs))
        if completion.prompt_logprobs is not None:
            self._prompt_logprobs = completion.prompt_logprobs[self._modes[0]]

    def segment(self, turns: tuple[Turn, ...], *, trainable: bool) -> Segment:
        """Raises ValueError where two lengths disagree. What the numbers are `fault` has looked at."""
        source = self._source.array()
        is_sampled = source == SOURCE_SAMPLED
        self._check(int(np.count_nonzero(is_sampled)), turns)
        return Segment.model_construct(
            token_ids=self.ids,
            source=source,
            logprobs=self.logprobs,
            loss_mask=is_sampled.view(np.uint8) if trainable else np.zeros(len(source), np.uint8),
            weight_versions=np.array(self._weight_versions, np.int64).reshape(-1, 2),
            kv_versions=np.array(self._kv_versions, np.int64).reshape(-1, 2),
            turns=turns,
            more_logprobs={mode: self._logprobs[mode].array() for mode in self._modes[1:]},
            prompt_logprobs=self._prompt_logprobs,
            top_ids=np.concatenate([ids for ids, _ in self._top]) if self._top else None,
            top_logprobs=np.concatenate([logprobs for _, logprobs in self._top]) if self._top else None,
        )

    def _check(self, sampled: int, turns: tuple[Turn, ...]) -> None:
        length = self._ids.length
        columns: tuple[_Column[Any], ...] = (self._source, *self._logprobs.values())
        for column in columns:
            if column.length != length:
                raise ValueError(f"a column has {column.length} entries for {length} token_ids")
        for runs in (self._weight_versions, self._kv_versions):
            if sum(count for _, count in runs) != sampled:
                raise ValueError(f"versions must count {sampled} sampled tokens in all: {runs}")
        for ids, logprobs in self._top:
            if ids.shape != logprobs.shape:
                raise ValueError(f"alternatives are {list(ids.shape)}, their logprobs {list(logprobs.shape)}")
        if self._top and sum(len(ids) for ids, _ in self._top) != sampled:
            raise ValueError(f"alternatives must be of {sampled} sampled tokens")
        if self._prompt_logprobs is not None and len(self._prompt_logprobs) > length:
            raise ValueError(f"{len(self._prompt_logprobs)} prompt logprobs for {length} token_ids")
        if turns and turns[-1].start + turns[-1].length > length:
            raise ValueError(f"a turn lies outside of the segment's {length} tokens")

    def _extend(
        self,
        ids: IntArray,
        source: npt.NDArray[np.uint8] | int,
        sampled: BoolArray | bool,
        logprobs: Mapping[LogprobMode, FloatArray] | None = None,
    ) -> None:
        """source, sampled: for each of `ids`, or one for all."""
        count = len(ids)
        self._ids.extend(ids, count)
        self._source.extend(source, count)
        self._sampled.extend(sampled, count)
        for mode, column in self._logprobs.items():
            if logprobs is None:
                column.extend(0.0, count)
            else:
                column.extend(logprobs[mode], len(logprobs[mode]))


def fault(completion: Completion, request: Request) -> str | None:
    """What is wrong with the arrays of a completion, if anything: no length is mended and no number invented."""
    count = len(completion.token_ids)
    if completion.token_ids.dtype != np.int32:
        return f"token_ids are {completion.token_ids.dtype}, not int32"
    if (covered := sum(tokens for _, tokens in completion.weight_versions)) != count:
        return f"weight versions cover {covered} of {count} tokens"
    if count == 0:
        return None
    for mode in request.logprob_modes:
        if (wrong := _misshapen(completion.logprobs.get(mode), (count,))) is not None:
            return f"{mode} logprobs {wrong}"
        if not np.isfinite(completion.logprobs[mode]).all():
            return f"{mode} logprobs are not finite"
    if request.top_logprobs:
        for name, rows in (("top_ids", completion.top_ids), ("top_logprobs", completion.top_logprobs)):
            if (wrong := _misshapen(rows, (count, request.top_logprobs))) is not None:
                return f"{name} {wrong}"
    if request.prompt_logprobs:
        scores = (completion.prompt_logprobs or {}).get(request.logprob_modes[0])
        if (wrong := _misshapen(scores, (len(request.token_ids),))) is not None:
            return f"prompt logprobs {wrong}"
    return None


def _misshapen(array: npt.NDArray[Any] | None, shape: tuple[int, ...]) -> str | None:
    if array is None:
        return "are missing"
    return None if array.shape == shape else f"are {list(array.shape)}, not {list(shape)}"


class _Column(Generic[Scalar]):
    """An array that grows at its end. What was handed out is read-only and never changes."""

    def __init__(self, dtype: np.dtype[Scalar]) -> None:
        self._dtype = dtype
        self._whole: npt.NDArray[Scalar] | None = None
        self._parts: list[tuple[npt.NDArray[Any] | float, int]] = []
        self.length = 0

    def extend(self, part: npt.NDArray[Any] | float, count: int) -> None:
        """By an array of so many, or so many times one value."""
        self._parts.append((part, count))
        self._whole = None
        self.length += count

    def array(self) -> npt.NDArray[Scalar]:
        whole = self._whole
        if whole is None:
            whole, at = np.empty(self.length, self._dtype), 0
            for part, count in self._parts:
                whole[at : at + count] = part
                at += count
            whole.flags.writeable = False
            self._whole, self._parts = whole, [(whole, at)]
        return whole


def _add_runs(runs: list[tuple[int, int]], more: Iterable[tuple[int, int]]) -> None:
    for version, count in more:
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        elif count:
            runs.append((version, count))

"""What is measured, as data: groups of trajectories, each a list of turns with forced lengths.

Prompts and observations are random ids from fixed seeds; a run never sees the ids of another, so that no prefix cache
carries anything from one run to the next. A trajectory's later turns exist only in its `Job`: a driver hands each of
them over when the turn before it has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
SESSIONS = Path(__file__).parent
"""Where the files of lengths are, <workload>.json each."""


@dataclass(frozen=True, slots=True)
class Turn:
    """appended: ids that come before it (the prompt, later an observation); sampled: its forced length."""

    appended: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Workload:
    """groups: the turns of each group's trajectories, alike for its `samples` but where these end their turns `apart`:
    then each samples, from its second turn on, what the sample before it does a turn later.

    short: a second, smaller number of sampled tokens; the time per token is the difference of the two. 0 where there
    is none (several turns). decode_only: tokens/s are those of decode, the prompts' time is taken out.
    """

    name: str
    groups: tuple[tuple[Turn, ...], ...]
    samples: int = 1
    apart: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    prefix_cache: bool = False
    short: int = 0
    decode_only: bool = False

    @property
    def concurrency(self) -> int:
        return len(self.groups) * self.samples

    @property
    def sampled_tokens(self) -> int:
        return self.samples * sum(turn.sampled for turns in self.groups for turn in turns)

    @property
    def longest(self) -> int:
        """Tokens of the longest trajectory."""
        return max(map(_length, self.groups))

    @property
    def kv_tokens(self) -> int:
        """Tokens of all trajectories at their ends, no prefix counted as shared."""
        return self.samples * sum(map(_length, self.groups))

    @property
    def mean_context(self) -> float:
        """Tokens of KV that all rows of a decode step read together, mean over the steps between the two lengths."""
        return self.samples * sum(turn.appended + (self.short + turn.sampled) / 2 for (turn,) in self.groups)

    def turns(self, group: int, sample: int) -> tuple[Turn, ...]:
        """Of one trajectory. The first turn is the group's, as one submit has it; sums are the group's too."""
        first, *later = self.groups[group]
        if not self.apart or not later:
            return self.groups[group]
        ahead = sample % len(later)
        lengths = [turn.sampled for turn in later[ahead:] + later[:ahead]]
        return (first, *(Turn(turn.appended, sampled) for turn, sampled in zip(later, lengths, strict=True)))

    def cut(self, sampled: int) -> Workload:
        """The same with `sampled` tokens a turn."""
        return replace(self, groups=tuple(tuple(Turn(t.appended, sampled) for t in turns) for turns in self.groups))

    def first_turns(self) -> Workload:
        return replace(self, groups=tuple(turns[:1] for turns in self.groups))

    def shrunk(self, by: int) -> Workload:
        """A small one of the same form: lengths, groups (or rows) divided by `by`, at least two of each."""
        if by == 1:
            return self
        groups = tuple(
            tuple(Turn(max(2, t.appended // by), max(2, t.sampled // by)) for t in turns)
            for turns in self.groups[-max(2, len(self.groups) // by) :]
        )
        short = max(1, self.short // by) if self.short else 0
        return replace(self, name=f"{self.name}_div{by}", groups=groups, short=short)


def _length(turns: tuple[Turn, ...]) -> int:
    return sum(turn.appended + turn.sampled for turn in turns)


def _flat(name: str, prompt: int, sampled: int, rows: int, short: int, temperature: float = 0.0) -> Workload:
    return Workload(name, rows * ((Turn(prompt, sampled),),), temperature=temperature, short=short)


def _tail() -> Workload:
    """63 rows at a context of 1,024 and one at 16,384, each the mean over the steps that are timed."""
    short, sampled = 32, 128
    before = (short + sampled) // 2
    lengths = [1024] * 63 + [16384]
    groups = tuple((Turn(length - before, sampled),) for length in lengths)
    return Workload("tail", groups, short=short, decode_only=True)


def _grpo() -> Workload:
    turns = (Turn(1024, 256), Turn(128, 256), Turn(128, 256))
    return Workload("grpo", 64 * (turns,), samples=8, temperature=1.0, prefix_cache=True)


def _sessions(name: str, apart: bool = False) -> Workload:
    """Recorded sessions of agents, eight samples of each."""
    sessions = json.loads((SESSIONS / f"{name}.json").read_text())["sessions"]
    groups = tuple(tuple(_turns(session)) for session in sessions)
    return Workload(name, groups, samples=8, apart=apart, temperature=1.0, prefix_cache=True)


def _turns(session: list[tuple[int, int]]) -> Iterator[Turn]:
    """The file gives each turn's whole prompt; what it appends is the rest over the sequence so far."""
    length = 0
    for prompt, sampled in session:
        yield Turn(prompt - length, sampled)
        length = prompt + sampled


@cache
def workloads() -> dict[str, Workload]:
    """By name. F_t1 and G_t1 are F and G at temperature 1 (F' and G'), F_filtered is F under the law that Qwen3 is
    recommended with."""
    found = [
        _flat("A", 512, 128, 1, 16),
        _flat("B", 256, 128, 8, 16),
        _flat("C", 256, 128, 16, 16),
        _flat("D", 2048, 128, 1, 16),
        _flat("E", 8192, 64, 1, 8),
        _flat("F", 512, 512, 64, 64),
        _flat("G", 512, 512, 256, 64),
        _flat("F_t1", 512, 512, 64, 64, temperature=1.0),
        _flat("G_t1", 512, 512, 256, 64, temperature=1.0),
        replace(_flat("F_filtered", 512, 512, 64, 64, temperature=0.6), top_k=20, top_p=0.95),
        _tail(),
        _grpo(),
        _sessions("code_localization"),
        _sessions("tool_turns", apart=True),
    ]
    return {workload.name: workload for workload in found}


@dataclass(frozen=True, slots=True)
class Job:
    """One trajectory of one run. seed: of its group's noise and of all its ids; sample: its place in the group."""

    group: int
    sample: int
    turns: tuple[Turn, ...]
    seed: int

    @property
    def id(self) -> str:
        return f"{self.group}.{self.sample}"

    def appended(self, turn: int, vocab_size: int) -> Ids:
        """int32[n], what comes before a turn: for the first one the prompt, which is the group's."""
        key = (self.seed, turn, self.sample if turn else 0)
        return np.random.default_rng(key).integers(0, vocab_size, self.turns[turn].appended, np.int32)


def jobs(workload: Workload, seed: int) -> list[Job]:
    """The trajectories of one run, in the order in which they are submitted. Two runs share no ids."""
    of_run = (crc32(workload.name.encode()) << 20) + seed
    return [
        Job(group, sample, workload.turns(group, sample), (of_run << 12) + group)
        for group in range(len(workload.groups))
        for sample in range(workload.samples)
    ]

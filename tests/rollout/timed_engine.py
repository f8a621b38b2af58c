"""An `EngineHandle` without a model: replies are a formula, and each takes as long as the test says.

Token k of a reply is `(len(prompt) + k) % VOCAB`, its logprob `-(k % 16) / 16 - 1`.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from queue import Empty, SimpleQueue

import numpy as np

from engine.handle import (
    Abort,
    Command,
    Committed,
    CommitWeights,
    DiscardWeights,
    EngineStats,
    Pause,
    Ping,
    Prepared,
    PrepareWeights,
    Report,
    Resume,
    Submit,
    WeightsFailed,
    WeightsReport,
)
from engine.request import Completion, Failure, FinishReason, Request
from engine.step import WeightsInfo

VOCAB = 1000
REMEMBERED = 1000
"""Commands in `seen`: all would hide what a worker keeps."""


@dataclass
class Running:
    request: Request
    started: float


@dataclass
class TimedEngine:
    """seconds_per_token: 0 answers at once. prepare_s: how long a prepare takes. A file name with "bad" is refused.
    score_s: how long a score takes.

    Thread-safe to look at: `live` (requests not ended), `seen` (the last commands), `aborted` (request ids).
    """

    seconds_per_token: float = 0.0
    prepare_s: float = 0.0
    score_s: float = 0.0
    live: dict[str, Running] = field(default_factory=dict)
    seen: list[Command] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self._inbox: SimpleQueue[Command | None] = SimpleQueue()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._prepared: dict[str, WeightsInfo] = {}
        self._commit: tuple[CommitWeights, float] | None = None
        self._held: list[Request] = []
        self._paused = False
        self._ended: list[Completion] = []
        self._weights: list[WeightsReport] = []
        self._died: Failure | None = None
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[Report], None]) -> None:
        self._deliver = deliver
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._inbox.put(command)

    def close(self, timeout: float) -> bool:
        self._inbox.put(None)
        assert self._thread is not None
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def die(self) -> None:
        self._died = Failure("engine_dead", "the test pulled the plug")
        self._inbox.put(Submit(()))

    def _run(self) -> None:
        while self._died is None:
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            try:
                command = self._inbox.get(timeout=wait)
            except Empty:
                pass
            else:
                if command is None:
                    return
                self.seen.append(command)
                del self.seen[:-REMEMBERED]
                self._take(command)
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            self._advance_commit()
            self._report()
        self._deliver(Report(died=self._died))

    def _report(self) -> None:
        if not self._ended and not self._weights:
            return
        completions, self._ended = tuple(self._ended), []
        weights, self._weights = tuple(self._weights), []
        self._deliver(Report(completions=completions, weights=weights, stats=self._stats()))

    def _stats(self) -> EngineStats:
        return EngineStats(running=len(self.live), weight_version=self.version, paused=self._paused)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), what))

    def _take(self, command: Command) -> None:
        match command:
            case Submit(requests):
                for request in requests:
                    self._begin(request)
            case Abort(ids, reason):
                self.aborted.extend(ids)
                for name in ids:
                    self._end(name, reason)
            case PrepareWeights():
                self._later(self.prepare_s, lambda: self._prepare(command))
            case CommitWeights():
                self._commit = command, time.monotonic()
                self._later(command.drain_timeout if command.mode == "drain" else 0.0, lambda: None)
            case DiscardWeights(update_id):
                self._prepared.pop(update_id, None)
            case Ping():
                self._deliver(Report(stats=self._stats()))
            case Pause():
                self._paused = True
            case Resume():
                self._paused = False
                for running in list(self.live.values()):
                    self._schedule(running.request)

    def _begin(self, request: Request) -> None:
        if self._commit is not None:
            self._held.append(request)
            return
        self.live[request.id] = Running(request, time.monotonic())
        if self._seconds(request) == 0 and not self._paused:
            self._end(request.id, "length")
        else:
            self._schedule(request)

    def _seconds(self, request: Request) -> float:
        return self.score_s if request.max_tokens == 0 else request.max_tokens * self.seconds_per_token

    def _schedule(self, request: Request) -> None:
        self._later(self._seconds(request), lambda: self._expire(request.id))

    def _expire(self, name: str) -> None:
        if not self._paused:
            self._end(name, "length")

    def _end(self, name: str, reason: FinishReason) -> None:
        running = self.live.pop(name, None)
        if running is None:
            return
        request = running.request
        count = request.max_tokens
        if reason != "length":
            count = min(count, int((time.monotonic() - running.started) / (self.seconds_per_token or 1.0)))
        self._ended.append(self._completion(request, count, reason))

    def _completion(self, request: Request, count: int, reason: FinishReason) -> Completion:
        length = len(request.token_ids)
        scores = np.full(length, -1.5, np.float32)
        scores[:1] = np.nan
        k = request.top_logprobs
        return Completion(
            request.id,
            reason,
            reply_ids(length, count),
            dict.fromkeys(request.logprob_modes, reply_logprobs(count)),
            weight_versions=((self.version, count),) if count else (),
            kv_version=self.version,
            top_ids=np.zeros((count, k), np.int32) if k else None,
            top_logprobs=np.full((count, k), -1.0, np.float32) if k else None,
            prompt_logprobs=dict.fromkeys(request.logprob_modes, scores) if request.prompt_logprobs else None,
        )

    def _prepare(self, command: PrepareWeights) -> None:
        if "bad" in PurePath(command.path).name:  # not in a folder: tests make up names of them
            failure = Failure("weights_invalid", f"{command.path}: expected another shape")
            self._weights.append(WeightsFailed(command.update_id, failure))
            return
        info = WeightsInfo(command.version, f"stub:{command.path}", 1000, self.prepare_s)
        self._prepared[command.update_id] = info
        self._weights.append(Prepared(command.update_id, info))

    def _advance_commit(self) -> None:
        if self._commit is None:
            return
        command, since = self._commit
        overdue = time.monotonic() - since >= command.drain_timeout
        if self.live and (command.mode == "abort" or (overdue and command.on_timeout == "abort")):
            for name in list(self.live):
                self._end(name, "abort_weight_update")
        if self.live and not overdue:
            return
        if self.live:
            failure = Failure("weights_busy", "requests still ran at the end of the drain")
            self._weights.append(WeightsFailed(command.update_id, failure))
        elif (info := self._prepared.pop(command.update_id, None)) is None:
            self._weights.append(WeightsFailed(command.update_id, Failure("weights_invalid", "not prepared")))
        else:
            self.version = info.version
            self._weights.append(Committed(command.update_id, replace(info, version=self.version), 0.001))
        self._commit = None
        held, self._held = self._held, []
        for request in held:
            self._begin(request)


_LONGEST = 2**17
_IDS = (np.arange(_LONGEST) % VOCAB).astype(np.int32)
_LOGPROBS = (-(np.arange(_LONGEST) % 16) / 16 - 1).astype(np.float32)


def reply_ids(prompt_len: int, count: int) -> np.ndarray:
    start = prompt_len % VOCAB
    return _IDS[start : start + count]


def reply_logprobs(count: int) -> np.ndarray:
    return _LOGPROBS[:count]

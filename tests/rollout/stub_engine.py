"""An `EngineHandle` that is told what to say: replies by request, held requests, errors, death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from engine.handle import Abort, Command, EngineStats, Report, Submit, WeightsReport
from engine.request import Completion, Failure, FinishReason, Request, Times, refusal

Reply = Callable[[Request], Completion | None]


def completed(
    request: Request,
    ids: Sequence[int] = (7,),
    reason: FinishReason = "stop",
    *,
    version: int = 0,
    times: Times | None = None,
    error: Failure | None = None,
) -> Completion:
    """A whole and plausible completion; token i has logprob -(i + 1) / 8 in the first mode, and so on."""
    count = len(ids)
    base = -np.arange(1, count + 1, dtype=np.float32) / 8
    k = request.top_logprobs
    return Completion(
        request.id,
        reason,
        np.array(ids, np.int32),
        {mode: base - index for index, mode in enumerate(request.logprob_modes)},
        weight_versions=((version, count),) if count else (),
        kv_version=version,
        times=times or Times(),
        stop=int(ids[-1]) if reason == "stop" and count else None,
        top_ids=np.full((count, k), 3, np.int32) if k else None,
        top_logprobs=np.full((count, k), -1.0, np.float32) if k else None,
        prompt_logprobs=(
            {mode: np.full(len(request.token_ids), -2.0, np.float32) for mode in request.logprob_modes}
            if request.prompt_logprobs
            else None
        ),
        error=error,
    )


def refused(request: Request, code: str, message: str = "no", field: str | None = None) -> Completion:
    """What the engine says to a request that it does not take."""
    return refusal(request, Failure(code, message, field))


class StubEngine:
    """Answers each request with `reply(request)`; None holds it until `finish` or an abort.

    Everything runs on the caller's thread, so that a test sees each step. submitted: the requests, in order.
    """

    def __init__(self, reply: Reply = completed, *, partial: Sequence[int] = (5, 6)) -> None:
        self.reply = reply
        self.partial = partial
        self.commands: list[Command] = []
        self.submitted: asyncio.Queue[Request] = asyncio.Queue()
        self.held: dict[str, Request] = {}
        self.version = 0
        self.refuses: Exception | None = None
        self.closed = False

    def start(self, deliver: Callable[[Report], None]) -> None:
        self._deliver = deliver

    def send(self, command: Command) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.commands.append(command)
        if isinstance(command, Submit):
            for request in command.requests:
                self._submit(request)
        elif isinstance(command, Abort):
            for request_id in command.request_ids:
                if request_id in self.held:
                    self.finish(completed(self.held[request_id], self.partial, command.reason, version=self.version))

    def close(self, timeout: float) -> bool:
        assert timeout > 0
        self.closed = True
        return True

    def finish(self, completion: Completion) -> None:
        self.held.pop(completion.request_id, None)
        self.report(completions=(completion,))

    def report(
        self,
        completions: tuple[Completion, ...] = (),
        weights: tuple[WeightsReport, ...] = (),
        died: Failure | None = None,
    ) -> None:
        self._deliver(Report(completions, weights, replace(EngineStats(), weight_version=self.version), died))

    def _submit(self, request: Request) -> None:
        self.submitted.put_nowait(request)
        completion = self.reply(request)
        if completion is None:
            self.held[request.id] = request
        else:
            self.finish(completion)

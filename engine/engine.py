"""The loop: launch step N+1, then finish step N.

    CPU  | plan N+1 | launch N+1 | finish N: wait, append, stop checks, frees | plan N+2 ...
    GPU  | ---------- step N ---------- | ---------- step N+1 ---------- |

The token sampled at N feeds N+1 on the device; the host learns it one step late. So a request that stops at N may
already have a row in N+1: that row's result is dropped, told by the stay in the slot and not by the slot.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

from engine.check import check_request
from engine.config import EngineConfig
from engine.errors import DuplicateRequest
from engine.handle import EngineStats
from engine.request import Completion, Failure, FinishReason, Int64Array, IntArray, Request
from engine.scheduling.phases import PausableClock, PhaseTimes
from engine.scheduling.results import live_results
from engine.scheduling.scheduled import Scheduled
from engine.scheduling.scheduler import OutOfBlocks, Scheduler
from engine.scheduling.sequence import Sequence as Live
from engine.scheduling.stop import StopChecks, StringMatcher
from engine.step import EMPTY_SUPPORT, Runner, Ticket

GOES_ON: frozenset[FinishReason] = frozenset(("stop", "length", "turn_deadline"))
"""Ends of a turn after which the trajectory may have another one."""


class Engine:
    """Requests in, completions out; synchronous, and owned by one thread.

    token_bytes: the bytes of each id, for stop strings; None refuses those. weight_version: what serves at start.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        token_bytes: Sequence[bytes] | None = None,
        *,
        weight_version: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.weight_version = weight_version
        self.paused = False
        self._runner = runner
        self._config = config
        self._token_bytes = token_bytes
        self._clock = PausableClock(clock)
        self._scheduler = Scheduler(config, runner.num_blocks)
        self._stops = StopChecks(runner.vocab_size)
        self._live: dict[str, Live] = {}
        self._flights: deque[tuple[Scheduled, Ticket]] = deque()
        self._ended: list[Completion] = []
        self._arrivals = 0
        self._totals = Counter[str]()  # by the names of `EngineStats`

    @property
    def has_work(self) -> bool:
        """Would `step` do anything now?"""
        return bool(self._ended or self._flights) or (not self.paused and self._scheduler.has_work)

    @property
    def has_started(self) -> bool:
        """Is there a request that has held a slot and has not ended?"""
        return any(sequence.started for sequence in self._live.values())

    def live_requests(self) -> list[Request]:
        return [sequence.request for sequence in self._live.values()]

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` naming the field; then nothing was queued."""
        if request.id in self._live:
            raise DuplicateRequest(f"request {request.id!r} is still running", field="id")
        usable = self._scheduler.pool.num_usable
        check_request(request, self._config, self._runner.vocab_size, usable, self._token_bytes is not None)
        sequence = Live(request, self._arrivals, self._config.max_context, PhaseTimes(self._clock))
        if request.stop.strings:
            assert self._token_bytes is not None
            sequence.matcher = StringMatcher(request.stop.strings, self._token_bytes)
            for token_id in request.token_ids[len(request.token_ids) - request.begun :].tolist():
                sequence.matcher.push(token_id)
        self._arrivals += 1
        self._live[request.id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a request with what it has; one that is unknown or has ended is left alone."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, reason)

    def release_kv(self, keys: Iterable[str]) -> None:
        """Trajectories that have ended: their KV is held no longer (`Request.trajectory`). Unknown keys are ignored."""
        for key in keys:
            self._scheduler.holds.end(key)

    def abort_started(self, reason: FinishReason) -> None:
        """End every request that has held a slot, with all tokens of the steps already launched."""
        self.drain()
        for sequence in [s for s in self._live.values() if s.started]:
            self._end(sequence, reason)

    def step(self) -> list[Completion]:
        """Launch the next step, then finish the one before it. Returns what has ended since the last call."""
        launched = not self.paused and self._launch()
        while len(self._flights) > (1 if launched and self._config.overlap else 0):
            self._finish(*self._flights.popleft())
        return self.take_ended()

    def take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Finish every launched step; what ended comes with the next `step`."""
        while self._flights:
            self._finish(*self._flights.popleft())

    def pause(self) -> None:
        """Launch no further step until `resume`; requests stay, and may be added and aborted."""
        self.drain()
        self.paused = True
        self._clock.pause()

    def resume(self) -> None:
        self.paused = False
        self._clock.resume()

    def hold(self) -> None:
        """Start no request that has not started yet; preempted ones may come back."""
        self._scheduler.admit_new = False

    def release(self) -> None:
        self._scheduler.admit_new = True

    def commit(self, apply: Callable[[], None], version: int) -> float:
        """Empty the pipe and let `apply` replace the weights in place; `version` serves from the next step on.

        Returns the seconds in which no step ran. When `apply` raises, the old version goes on serving.
        """
        self.drain()
        start = self._clock.pause()
        try:
            apply()
            for sequence in self._live.values():
                self._close_version_run(sequence)
            self._scheduler.begin_epoch()
            self.weight_version = version
        finally:
            end, _ = self._clock.read()
            if not self.paused:
                self._clock.resume()
        return end - start

    def stats(self) -> EngineStats:
        pool, table, holds = self._scheduler.pool, self._scheduler.table, self._scheduler.holds
        return EngineStats(
            running=table.num_running,
            waiting=self._scheduler.num_waiting,
            blocks_total=pool.num_usable,
            blocks_used=pool.num_used,
            blocks_held=holds.num_blocks,
            kv_holds=len(holds),
            kv_holds_dropped_total=holds.dropped_total,
            weight_version=self.weight_version,
            paused=self.paused,
            **self._totals,
        )

    def _launch(self) -> bool:
        try:
            scheduled = self._scheduler.plan(self._totals["steps_total"])
        except OutOfBlocks:
            if self._flights:
                self._totals["bubbles_total"] += 1
                self.drain()
            scheduled = self._plan_with_preemption()
        if scheduled is None:
            return False
        for sequence in scheduled.admitted:
            self._start(sequence)
        self._flights.append((scheduled, self._runner.launch(scheduled.plan)))
        self._totals["steps_total"] += 1
        self._totals["prompt_steps_total"] += bool(scheduled.chunks)
        for chunk in scheduled.chunks:
            chunk.sequence.computed_tokens += chunk.num_prompt
            self._totals["computed_prompt_tokens_total"] += chunk.num_prompt
        return True

    def _plan_with_preemption(self) -> Scheduled | None:
        while True:
            try:
                return self._scheduler.plan(self._totals["steps_total"])
            except OutOfBlocks:
                if not self._scheduler.drop_hold():
                    self._preempt(self._scheduler.newest_running())

    def _preempt(self, sequence: Live) -> None:
        assert sequence.slot is not None
        self._totals["preemptions_total"] += 1
        self._stops.end(sequence.slot)
        self._scheduler.preempt(sequence)
        sequence.times.enter("preempted")

    def _start(self, sequence: Live) -> None:
        assert sequence.slot is not None
        assert sequence.cached_tokens is not None
        if not sequence.preemptions:
            self._totals["prompt_tokens_total"] += sequence.prompt_len
            self._totals["cached_prompt_tokens_total"] += sequence.cached_tokens
        sequence.version = self.weight_version
        self._stops.start(sequence.slot, sequence.request.stop.ids, sequence.matcher)
        sequence.times.enter("prefill")

    def _finish(self, scheduled: Scheduled, ticket: Ticket) -> None:
        """Read the results of a launched step: append tokens, publish blocks, end what is over."""
        scheduler, plan = self._scheduler, scheduled.plan
        output = ticket.wait()
        scheduler.step_done(plan.step)
        results = live_results(scheduled, output, scheduler.table)
        self._totals["wasted_rows_total"] += plan.num_rows - results.num_live
        self._totals["graph_steps_total"] += output.graph
        self._totals["split_steps_total"] += output.split
        self._totals["padding_tokens_total"] += output.padding_tokens
        self._totals["sampled_tokens_total"] += len(results.slots)
        scheduler.table.record(results.slots, results.positions, results.token_ids, results.logprobs)
        for sequence, flags in results.failed:
            self._fail(sequence, flags)
        for chunk in results.chunks:
            scheduler.chunk_done(chunk)
            if chunk.last:
                chunk.sequence.times.enter("decode")
                if chunk.sequence.budget == 0:
                    self._end(chunk.sequence, "length")
        self._end_complete(results.slots, results.positions, results.token_ids)

    def _end_complete(self, slots: Int64Array, positions: Int64Array, token_ids: IntArray) -> None:
        """End the rows whose new token stops them or is the last of their budget."""
        table = self._scheduler.table
        stops = self._stops.check(slots, token_ids)
        full = (positions == table.last_position[slots]).nonzero()[0].tolist()
        over = [(table.owner(slots[i]), stops.get(i)) for i in sorted({*full, *stops})]
        for sequence, stop in over:
            if stop is not None:
                self._end(sequence, "stop", stop=stop)
            else:
                self._end(sequence, "context_overflow" if sequence.overflow else "length")

    def _fail(self, sequence: Live, flags: int) -> None:
        self._totals["nonfinite_total"] += 1
        what = "no id was left to sample from" if flags & EMPTY_SUPPORT else "the logits were not finite"
        self._end(sequence, "error", error=Failure("numerical_error", what))

    def _end(
        self, sequence: Live, reason: FinishReason, *, stop: int | bytes | None = None, error: Failure | None = None
    ) -> None:
        """The one way out: leave slot and queues, and say how it ended."""
        self._close_version_run(sequence)
        if sequence.slot is not None:
            self._stops.end(sequence.slot)
        elif not sequence.started:
            sequence.version = self.weight_version
        self._scheduler.remove(sequence, trusted=error is None, goes_on=reason in GOES_ON)
        del self._live[sequence.request.id]
        self._ended.append(sequence.completion(reason, sequence.times.end(), stop=stop, error=error))

    def _close_version_run(self, sequence: Live) -> None:
        table, slot = self._scheduler.table, sequence.slot
        known = len(sequence.ids) if slot is None else int(table.known[slot])
        sequence.close_version_run(self.weight_version, known - sequence.prompt_len)

"""Trajectories on an engine without a worker: who starts when, and when each turn goes in, as the worker decides it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from bench.workloads import Job, Workload
from engine.engine import Engine
from engine.request import Completion, Request, SamplingParams
from rollout.generation.kv_budget import Candidate, KvBudget


class Trajectory:
    """A job under way: `ids` grows by what was sampled and by the next turn's ids."""

    def __init__(self, workload: Workload, job: Job, order: int, vocab_size: int) -> None:
        self.order = order
        self._job = job
        self._kind = (workload.name, len(job.turns) > 1)
        self._longest = workload.longest
        self._group = str(job.seed) if workload.samples > 1 else ""
        self._params = SamplingParams(
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
            seed=job.seed,
            sample_index=job.sample,
        )
        self._appended = [job.appended(turn, vocab_size) for turn in range(len(job.turns))]
        self._turn = 0
        self._ids = self._appended[0]
        self.lengths_ok = True

    @property
    def id(self) -> str:
        return self._job.id

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def new_tokens(self) -> int:
        """Of all its prompts, those that no earlier turn had."""
        return sum(map(len, self._appended))

    def candidate(self) -> Candidate:
        """What is known of it before it starts. longest: the context limit, which all workloads of a run share."""
        return Candidate(self.id, self._job.seed, self._kind, len(self._appended[0]), self._longest)

    def request(self, wait: float = 0.0) -> Request:
        """The turn that is next. wait: seconds that the one after it is expected to take to come."""
        return Request(
            id=self.id,
            token_ids=self._ids,
            max_tokens=self._job.turns[self._turn].sampled,
            params=self._params,
            order=self.order,
            group="" if self._turn else self._group,
            trajectory=self.id,
            goes_on=len(self._job.turns) > 1,  # an environment does not say which turn is its last
            expected_wait=wait,
        )

    def end_turn(self, completion: Completion) -> bool:
        """Take a turn's result. Is there another turn?"""
        count = self._job.turns[self._turn].sampled
        logprobs = completion.logprobs["processed"]
        whole = completion.finish_reason == "length" and len(completion.token_ids) == len(logprobs) == count
        self.lengths_ok &= whole and bool(np.isfinite(logprobs).all())
        self._turn += 1
        self._ids = np.concatenate((self._ids, completion.token_ids))
        if self._turn == len(self._job.turns) or not whole:
            return False
        self._ids = np.concatenate((self._ids, self._appended[self._turn]))
        return True


class Feed:
    """Gives an engine the turns of trajectories. kv: None starts them all and lets every turn in at once.

    wait: mean seconds that a trajectory is away between turns, as the engine is told.
    """

    def __init__(
        self, engine: Engine, trajectories: Iterable[Trajectory], kv: KvBudget | None, wait: float = 0.0
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._wait = wait
        self._queue = deque(trajectories)
        self._running: dict[str, Trajectory] = {}
        self._ready: list[Trajectory] = []

    @property
    def over(self) -> bool:
        return not self._queue and not self._running

    def fill(self) -> None:
        """Start what may start and let in the turns that may go on, oldest first."""
        kv = self._kv
        while self._queue and (kv is None or kv.may_start(self._queue[0].candidate())):
            trajectory = self._queue.popleft()
            self._running[trajectory.id] = trajectory
            self._ready.append(trajectory)
            if kv is not None:
                kv.start(trajectory.candidate())
        self._ready.sort(key=lambda trajectory: trajectory.order)
        while self._ready and (kv is None or kv.may_go_on(self._ready[0].id)):
            self._engine.add(self._ready.pop(0).request(self._wait))

    def take(self, completion: Completion) -> Trajectory | None:
        """A turn has ended: the trajectory that is now with its environment, if there is another turn."""
        trajectory = self._running[completion.request_id]
        seen = trajectory.length + len(completion.token_ids)
        goes_on = trajectory.end_turn(completion)
        if self._kv is not None:
            self._kv.grew(trajectory.id, seen, self._wait)
        if goes_on:
            return trajectory
        del self._running[trajectory.id]
        self._engine.release_kv((trajectory.id,))
        if self._kv is not None:
            self._kv.end(trajectory.id, tells=True)
        return None

    def come_back(self, trajectory: Trajectory) -> None:
        """Its environment has answered."""
        self._ready.append(trajectory)
        if self._kv is not None:
            self._kv.grew(trajectory.id, trajectory.length)

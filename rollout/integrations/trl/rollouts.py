"""`rollout_worker=` of `trl.experimental.async_grpo.AsyncGRPOTrainer`."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import numpy.typing as npt

from protocols.errors import RolloutError
from protocols.fields import Sampling
from rollout.client import Batch, RolloutClient, Trajectory
from rollout.integrations.trl.law import encode_prompt, law, options_of, warn_of_filters

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""How long a thread waits for room, or for a worker that takes no work, before it looks again."""
FRUITLESS = 3
"""Groups in a row without anything to train on, after which it is no accident."""
METRICS = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """What TRL calls `RolloutSample`, field by field (importing that one loads the whole trainer).

    input_ids: int64[L]. completion_mask: int64[L], 1 on what is trained on. old_log_probs: float32[L], 0.0 elsewhere.
    model_version: TRL's number of the oldest weights that sampled a token of it.
    """

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


def environment_reward(trajectory: Trajectory, row: Mapping[str, Any]) -> float | None:  # noqa: ARG001
    return trajectory.reward


class AsyncRollouts:
    """TRL's `RolloutWorkerProtocol`: keeps groups in flight in the worker and puts what they give into a queue.

    args: the trainer's `AsyncGRPOConfig`; temperature, filters, lengths, group size, the number of samples in flight
    (`max_inflight_tasks`) and the size of the queue come from it. rows: the dataset, over and over; each has a
    "prompt". reward: of a trajectory and its row, called on several threads; None leaves it out of its group; without
    it the environment's own. encode: from a prompt to token ids; without it the tokenizer and its chat template do
    it. options: more arguments of `RolloutClient.group`; they win over `args`. One that is a function is called with
    each row.

    Failed and aborted trajectories are left out. Advantages are TRL's own: (r - mean) / (std + 1e-8) in the group.
    """

    def __init__(
        self,
        client: RolloutClient,
        args: Any,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: Any,
        *,
        reward: Callable[[Trajectory, Mapping[str, Any]], float | None] = environment_reward,
        encode: Callable[[Any], Sequence[int]] | None = None,
        **options: Any,
    ) -> None:
        self.rollout_buffer: queue.Queue[Sample] = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(METRICS)
        self._client = client
        self._args = args
        self._rows = _numbered(rows)
        self._tokenizer = tokenizer
        self._reward = reward
        self._encode = encode
        self._options = options
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._batches: set[Batch] = set()
        self._error: BaseException | None = None
        self._warned = False
        self._fruitless = 0
        self._offset = 0

    def start(self) -> None:
        """One thread for each group in flight; they wait, they do not compute."""
        if self._threads:
            return
        self._stopping.clear()
        count = max(1, self._args.max_inflight_tasks // self._args.num_generations)
        self._threads = [
            threading.Thread(target=self._produce, name=f"trl-rollouts-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Cancel what is in flight; when it returns no thread is left."""
        self._end()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def update_model_version(self, model_version: int) -> None:
        """TRL's number of the weights that serve from now on, which is not the worker's."""
        self._offset = self._client.ping().weight_version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises RuntimeError if a thread has given up, or if the worker answers no ping in `stale_after_s` seconds.
        A worker that lives may take as long as its trajectories are."""
        if self._error is not None:
            raise RuntimeError(f"rollouts have ended: {self._error}") from self._error
        try:
            self._client.ping(timeout=stale_after_s)
        except RolloutError as error:
            raise RuntimeError(f"the rollout worker does not answer: {error}") from error

    def _produce(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._lock:
                    number, row = next(self._rows)
                if (trajectories := self._roll_out(row)) is not None:
                    self._deliver(self._samples(number, row, trajectories))
        except BaseException as error:
            with self._lock:
                if self._stopping.is_set():
                    return
                self._error = error
                log.exception("rollouts have ended")
            self._end()

    def _end(self) -> None:
        """Make every thread end: those that wait for a batch see it closed."""
        with self._lock:
            self._stopping.set()
            batches = list(self._batches)
        for batch in batches:
            batch.close()

    def _roll_out(self, row: Mapping[str, Any]) -> list[Trajectory] | None:
        """A whole group; None when stopped meanwhile."""
        prompt = row["prompt"]
        template = self._args.chat_template_kwargs or {}
        ids = self._encode(prompt) if self._encode else encode_prompt(self._tokenizer, prompt, **template)
        arguments = law(self._args) | options_of(self._options, row)
        while not self._stopping.is_set():
            group = self._client.group(ids, self._args.num_generations, **arguments)
            self._warn_once(group.sampling)
            try:
                batch = self._client.submit(group)
                with batch, self._in_flight(batch):
                    return batch.results()
            except RolloutError as error:
                if not error.retryable:
                    raise
                log.warning("the worker takes no work now, trying again: %s", error)
                self._stopping.wait(LOOK_S)
        return None

    def _warn_once(self, sampling: Sampling) -> None:
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            warn_of_filters(sampling)

    @contextmanager
    def _in_flight(self, batch: Batch) -> Iterator[None]:
        with self._lock:
            if self._stopping.is_set():
                batch.close()
            self._batches.add(batch)
        try:
            yield
        finally:
            with self._lock:
                self._batches.discard(batch)

    def _samples(self, number: int, row: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> list[Sample]:
        """A sample for each segment of each trajectory that has a reward."""
        rewards = [self._reward(t, row) if t.ok else None for t in trajectories]
        scored = [(t, r) for t, r in zip(trajectories, rewards, strict=True) if r is not None and not isnan(r)]
        self._measure(trajectories)
        self._note(bool(scored), trajectories)
        if not scored:
            return []
        values = np.array([reward for _, reward in scored], np.float64)
        advantages = (values - values.mean()) / (values.std() + 1e-8)
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        found = []
        for (trajectory, reward), advantage in zip(scored, advantages, strict=True):
            oldest = trajectory.weight_version_min
            for segment in trajectory.segments:
                if oldest is None or not segment.loss_mask.any():
                    continue
                mask = segment.loss_mask.astype(np.int64)
                text = self._tokenizer.decode(segment.token_ids[int(mask.argmax()) :].tolist())
                sample = Sample(
                    prompt=messages,
                    completion=[{"role": "assistant", "content": text}],
                    input_ids=segment.token_ids.astype(np.int64),
                    completion_mask=mask,
                    old_log_probs=segment.logprobs * segment.loss_mask,
                    advantage=float(advantage),
                    model_version=oldest - self._offset,
                    group_id=number,
                    metrics={"reward": float(reward), "reward_std": float(values.std())},
                    enqueued_at=time.time(),
                )
                found.append(sample)
        return found

    def _measure(self, trajectories: Sequence[Trajectory]) -> None:
        count = len(trajectories)
        with suppress(queue.Full):  # a trainer that logs nothing holds up no rollouts
            self.metrics_queue.put_nowait(
                {
                    "rollout/failed_ratio": (sum(not t.ok for t in trajectories), count),
                    "rollout/truncated_ratio": (sum(t.status == "truncated" for t in trajectories), count),
                    "rollout/num_turns": (sum(len(t.turns) for t in trajectories), count),
                    "rollout/trajectory_s": (sum(t.wall_s for t in trajectories), count),
                }
            )

    def _note(self, fruitful: bool, trajectories: Sequence[Trajectory]) -> None:
        """Raises RuntimeError when nothing comes of group after group: the trainer would wait for ever."""
        with self._lock:
            self._fruitless = 0 if fruitful else self._fruitless + 1
            fruitless = self._fruitless
        if fruitless >= FRUITLESS:
            worst = next((t for t in trajectories if not t.ok), trajectories[0])
            raise RuntimeError(
                f"{fruitless} groups in a row without anything to train on; of the last, {worst.trajectory_id}:"
                f" {worst.status}, {worst.finish_reason} {worst.error or '(without a reward)'}"
            )

    def _deliver(self, samples: Sequence[Sample]) -> None:
        """Waits while the queue is full: rollouts do not run away from the trainer."""
        for sample in samples:
            while not self._stopping.is_set():
                with suppress(queue.Full):
                    self.rollout_buffer.put(sample, timeout=LOOK_S)
                    break


def _numbered(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The rows over and over, with a running number. Raises ValueError when there are none, or none the second time."""
    number = 0
    while True:
        before = number
        for row in rows:
            yield number, row
            number += 1
        if number == before:
            raise ValueError("the dataset has no rows (any more): it must be iterable again and again")

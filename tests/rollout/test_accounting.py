"""Whatever happens at random, each trajectory of a batch ends in one record or is kept, and then nothing is held.

Batches want only some of their groups, keep or return the rest, retry, resume; environments raise, hang, return nothing
and kill their process; trajectories and groups are cancelled at any time. Two clients do so at once; one of them leaves
what is kept behind.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from engine.request import Request
from protocols.errors import RolloutError
from protocols.fields import Group, ModelInfo
from rollout.client import RolloutClient, Trajectory, TurnDone
from rollout.environments.base import Context, Environment, Step, TurnResult
from rollout.environments.registry import Registry
from rollout.service.service import Served, Service, Timeouts
from tests.rollout.timed_engine import VOCAB, TimedEngine
from tests.rollout.workers import eventually, worker

MAX_CONTEXT = 400
KV_TOKENS = 3_000
PROCESSES = 3


class Uneven(TimedEngine):
    """Some turns take no time, some a little, some longer than everything else."""

    def _seconds(self, request: Request) -> float:
        return (0.0, 0.0, 0.01, 0.05, 0.3)[zlib.crc32(request.id.encode()) % 5]


class Rough(Environment):
    """What happens depends on the trajectory, the attempt and the turn alone."""

    on_length = "continue"
    stateless = True

    async def reset(self, context: Context) -> None:
        self.name = f"{context.trajectory_id}/{context.sample_index}"
        await self.happen(random.Random(self.name), 0.03)

    async def step(self, turn: TurnResult) -> Any:
        chance = random.Random(f"{self.name}/{turn.index}")
        if await self.happen(chance, 0.06):
            return None
        return Step(observation=[7] * chance.choice((0, 1, 16, 60)), done=chance.random() < 0.3)

    async def happen(self, chance: random.Random, much: float) -> bool:
        """True: nothing is to be returned."""
        await asyncio.sleep(chance.choice((0.0, 0.0, 0.005, 0.03, 0.2)))
        drawn = chance.random()
        if drawn < much / 3:
            raise ValueError("on purpose")
        if drawn < much / 2:
            await asyncio.Event().wait()
        return drawn < much


class Rougher(Rough):
    """It may also kill its process, and with it the neighbours there."""

    isolation = "process"

    async def happen(self, chance: random.Random, much: float) -> bool:
        if chance.random() < much / 6:
            os.kill(os.getpid(), 9)
        return await super().happen(chance, much)


class Player:
    """One client: submits batches at random and keeps the books.

    kept: what the worker has for us. returned: what may be submitted again. gone: of this batch, cancelled.
    """

    def __init__(self, client: RolloutClient, name: str, seed: int) -> None:
        self.client = client
        self.name = name
        self.chance = random.Random(seed)
        self.kept: list[Group] = []
        self.returned: list[Trajectory] = []
        self.gone: set[str] = set()
        self.reasons: Counter[str] = Counter()
        self.groups = 0

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            self.round()

    def round(self) -> None:
        new = [self.group() for _ in range(self.chance.randint(1, 4))]
        resumed = self.taken(self.kept)
        again = self.taken(self.returned)
        self.gone.clear()
        batch = self.client.submit(new, resume=[*resumed, *again], **self.wish(len(new)))
        expected = Counter(name for group in (*new, *resumed) for name in group.trajectory_ids)
        expected.update(trajectory.trajectory_id for trajectory in again)
        self.meddle(new)
        found: Counter[str] = Counter()
        for event in batch.events():
            if isinstance(event, TurnDone):
                self.answer(event)
            else:
                found[event.trajectory_id] += 1
                self.look_at(event)
            if self.chance.random() < 0.1:
                self.meddle(new)
        found.update(name for group in batch.kept for name in group.trajectory_ids)
        assert found == expected, (self.name, found - expected, expected - found)
        self.reasons["kept"] += sum(len(group.trajectory_ids) for group in batch.kept)
        for group in batch.kept:
            if self.gone.intersection(group.trajectory_ids):
                self.forget([group])
            else:
                self.kept.append(group)

    def group(self) -> Group:
        chance = self.chance
        self.groups += 1
        size = chance.choice((1, 2, 4))
        environment = chance.choice(("rough", "rough", "rougher", "scripted", "remote"))
        fields: dict[str, Any] = {}
        if environment == "scripted":
            fields["script"] = [[1] * chance.choice((1, 16, 33)) for _ in range(chance.randint(0, 3))]
        if chance.random() < 0.15:
            fields["trajectory_deadline_s"] = chance.choice((0.02, 0.2))
        if chance.random() < 0.15:
            fields["turn_deadline_s"] = 0.02
        if chance.random() < 0.2:
            fields["priority"] = chance.choice((-1, 5))
        return self.client.group(
            [chance.randrange(VOCAB) for _ in range(chance.choice((1, 16, 90)))],
            size,
            id=f"{self.name}{self.groups}",
            environment=environment,
            max_tokens=chance.choice((1, 20)),
            max_turns=4,
            on_length="continue",
            tool_deadline_s=0.3,
            ignore_eos=True,
            seed=chance.randrange(99),
            **fields,
        )

    def wish(self, groups: int) -> Mapping[str, Any]:
        chance = self.chance
        wish: dict[str, Any] = {"max_retries": chance.choice((0, 0, 2))}
        if chance.random() < 0.8:
            wish |= {"groups_needed": chance.randint(1, groups), "min_complete": chance.choice((None, 1))}
            wish["surplus"] = chance.choice(("keep", "keep", "return"))
        return wish

    def taken(self, those: list[Any]) -> list[Any]:
        """Some of them, which then go on; the others stay."""
        drawn = [(self.chance.random() < 0.6, item) for item in those]
        those[:] = [item for picked, item in drawn if not picked]
        return [item for picked, item in drawn if picked]

    def answer(self, turn: TurnDone) -> None:
        drawn = self.chance.random()
        if drawn < 0.1:
            return  # its deadline answers
        try:
            if drawn < 0.7:
                self.client.continue_(turn, observation=[7] * self.chance.choice((1, 40)))
            else:
                self.client.continue_(turn, done=True, reward=1.0)
        except RolloutError:
            pass  # it came too late

    def look_at(self, trajectory: Trajectory) -> None:
        self.reasons[trajectory.finish_reason] += 1
        segment = trajectory.segment
        assert len(segment.token_ids) == len(segment.logprobs) == len(segment.loss_mask)
        sampled = sum(turn.length for turn in trajectory.turns)
        assert segment.loss_mask.sum() == (0 if trajectory.status == "failed" else sampled)
        assert abs(sum(trajectory.record.times.model_dump().values()) - trajectory.record.wall_s) < 1e-6
        if trajectory.resumable:
            self.returned.append(trajectory)

    def meddle(self, groups: list[Group]) -> None:
        """Cancel something: of this batch, or what was kept of earlier ones."""
        target, drawn = self.chance.choice([*groups, *self.kept]), self.chance.random()
        if any(target is group for group in self.kept):
            if drawn < 0.3:
                self.forget([target])
        elif drawn < 0.3:
            name = self.chance.choice(target.trajectory_ids)
            self.client.cancel(trajectory_ids=[name])
            self.gone.add(name)
        elif drawn < 0.4:
            self.client.cancel(group_ids=[target.id])
            self.gone.update(target.trajectory_ids)

    def forget(self, groups: list[Group]) -> None:
        """What is kept of them is not wanted any more."""
        self.client.cancel(trajectory_ids=[name for group in groups for name in group.trajectory_ids])
        self.kept = [group for group in self.kept if not any(group is forgotten for forgotten in groups)]


def held(service: Service) -> dict[str, int]:
    """All that a worker holds for trajectories; nothing is left out that is not 0 where it is idle."""
    runs, admission, gate = service.runs, service.runs.admission, service._generator
    sessions = service.sessions.all
    pools = (service.environments._pool, service.environments._tool_pool)
    return {
        "running": admission.running,
        "waiting": admission.waiting,
        "kept": admission.kept + len(runs._kept),
        "bytes": admission.reserved_bytes + admission.kept_bytes,
        "results": runs.results,
        "tasks": len(runs._tasks) + len(runs._closings) + len(runs._waiting),
        "trajectories": sum(len(session.trajectories) for session in sessions),
        "batches": sum(len(session.batches) for session in sessions),
        "events": sum(len(session.outbox) for session in sessions),
        "kv": len(gate._budget._running) + len(gate._away) + gate.num_waiting,  # type: ignore[union-attr]
        "environments": sum(process.load for pool in pools for process in pool.processes),
        "calls": sum(len(pool._line) for pool in pools),
    }


def play(seed: int, rounds: int) -> Counter[str]:
    model = ModelInfo(architecture="stub", dtype="float32", vocab_size=VOCAB, max_context=MAX_CONTEXT)
    registry = Registry({"rough": Rough, "rougher": Rougher}, processes=2 * PROCESSES)
    what = Served(model, 0, "stub:start", registry, kv_tokens=KV_TOKENS)
    timeouts = Timeouts(client=1.0, drain=1.0, ack=1.0)
    with worker(Uneven(), what=what, at_once=12, timeouts=timeouts) as thread:
        reasons: Counter[str] = Counter()
        failures: list[BaseException] = []

        def one(name: str, number: int) -> None:
            try:
                with RolloutClient(thread.address) as client:
                    player = Player(client, name, seed * 2 + number)
                    player.play(rounds)
                    if number:
                        player.forget(player.kept)
                    reasons.update(player.reasons)
            except BaseException as error:
                failures.append(error)

        players = [threading.Thread(target=one, args=(name, i), daemon=True) for i, name in enumerate("ab")]
        for player in players:
            player.start()
        for player in players:
            player.join(20.0 * rounds)
            assert not player.is_alive(), (seed, thread.call(held))
        for failure in failures:
            raise failure
        eventually(lambda: not any(thread.call(held).values()) and not thread.engine.live)
        assert thread.call(lambda service: service.runs.idle.is_set())
    return reasons


def test_every_trajectory_is_in_one_record_or_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    reasons = play(seed=1, rounds=5)
    assert {"kept", "env_error", "env_done"} <= reasons.keys()


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2, 22))
def test_every_trajectory_is_in_one_record_or_kept_in_many_rounds(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    print(dict(play(seed, rounds=12)))

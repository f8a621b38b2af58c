"""What is reserved for a record, and what it then takes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from protocols.codec import encode
from protocols.fields import Budget, Environment, Sampling, ScriptedTurn
from protocols.replies import TrajectoryDone
from rollout.batches.record_size import echoed_bytes, largest_record, longest
from rollout.service.service import Service
from tests.rollout.batches.test_admission import group
from tests.rollout.raw_client import RawClient
from tests.rollout.raw_client import group as raw_group
from tests.rollout.workers import eventually, served, worker

MAX_CONTEXT = 600


def scripted(*turns: tuple[int, int, int | None]) -> Environment:
    return Environment(
        script=[
            ScriptedTurn(glue=np.zeros(glue, np.int32), observation=np.zeros(seen, np.int32), max_tokens=tokens)
            for glue, seen, tokens in turns
        ]
    )


def test_the_longest_trajectory_of_a_script_is_counted_turn_by_turn() -> None:
    assert longest(group(), MAX_CONTEXT) == 13
    assert longest(group(environment=scripted((1, 2, None), (0, 5, 7))), MAX_CONTEXT) == 13 + 13 + 12
    assert longest(group(max_tokens=None), MAX_CONTEXT) == MAX_CONTEXT
    assert longest(group(max_tokens=10**6), MAX_CONTEXT) == MAX_CONTEXT
    assert longest(group(budget=Budget(max_total_tokens=9)), MAX_CONTEXT) == 9
    assert longest(group(environment=Environment(name="remote")), MAX_CONTEXT) == MAX_CONTEXT


def test_what_a_group_asks_for_is_reserved_for() -> None:
    def largest(**fields: Any) -> int:
        asked = group(**fields)
        return largest_record(asked, MAX_CONTEXT, echoed_bytes(asked))

    plain = largest()
    top = Sampling(max_tokens=10, top_logprobs=64)
    assert largest(sampling=top) == plain + 10 * 64 * 8
    modes = Sampling(max_tokens=10, logprobs=("raw", "processed", "temperature"))
    assert largest(sampling=modes) >= plain + 13 * 8
    allowed = Sampling(max_tokens=10, allowed_ids=np.zeros(5000, np.int32))
    assert largest(sampling=allowed) >= plain + 20_000
    assert largest(metadata={"note": "x" * 3000}) >= plain + 3000


def random_group(chance: random.Random, name: str) -> dict[str, Any]:
    def ids(most: int) -> np.ndarray:
        return np.array([chance.randrange(1000) for _ in range(chance.randint(0, most))], np.int32)

    sampling: dict[str, Any] = {
        "logprobs": chance.choice((["processed"], ["raw", "processed"], ["temperature", "raw", "processed"])),
        "top_logprobs": chance.choice((0, 0, 1, 64)),
        "prompt_logprobs": chance.random() < 0.3,
        "stop_ids": ids(64).tolist(),
    }
    if chance.random() < 0.3:
        sampling["allowed_ids"] = np.arange(chance.randint(1, 1000), dtype=np.int32)
    script = [{"glue": ids(5), "observation": ids(30), "max_tokens": chance.choice((None, 1, 40))} for _ in ids(12)]
    return raw_group(
        name,
        n=2,
        prompt=np.arange(chance.randint(1, 200)),
        max_tokens=chance.choice((None, 1, 7, 100)),
        sampling=sampling,
        environment={"script": script},
        budget={"max_turns": chance.choice((None, 2)), "max_total_tokens": chance.choice((None, 300))},
        metadata={"x" * chance.randint(0, 200): list(range(chance.randint(0, 500)))},
    )


def test_no_record_is_larger_than_what_was_reserved_for_it() -> None:
    chance = random.Random(5)

    def sizes(service: Service) -> list[tuple[int, int, int]]:
        members = service.sessions.all[0].trajectories.values()
        return [
            (
                sum(len(frame) for frame in encode(TrajectoryDone(id="x" * 256, record=member.record))),
                member.reserved,
                member.group.largest,
            )
            for member in members
            if member.record is not None
        ]

    with worker(what=served(max_context=MAX_CONTEXT)) as thread, RawClient(thread.address) as client:
        client.hello()
        groups = [random_group(chance, f"g{i}") for i in range(100)]
        assert client.call("submit", batch_id="b", groups=groups)["type"] == "accepted"
        eventually(lambda: thread.service.runs.results == 200)
        measured = thread.call(sizes)
        assert len(measured) == 200
        for encoded, kept, reserved in measured:
            assert encoded <= kept <= reserved
        # Scripted lengths are known well: most of what is reserved is used by the longest of them.
        assert sum(encoded for encoded, _, _ in measured) > 0.5 * sum(kept for _, kept, _ in measured)
        client.send("ack", trajectory_ids=[f"g{i}.{j}" for i in range(100) for j in range(2)])
        eventually(lambda: thread.service.runs.admission.reserved_bytes == 0)

"""The books of trajectories that are kept, cut and resumed at random, on the real engine: every token is accounted for.

Whatever happened, a trajectory is bit for bit what it is undisturbed; its mask covers exactly what was
sampled; each request extends the one before it, within a segment; and its times add up.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import zlib
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.handles.thread import ThreadEngine
from engine.request import Completion, Request, SamplingParams
from protocols.fields import SOURCE_SAMPLED, Budget, Environment, Group, ModelInfo, Record, Sampling, Template
from protocols.requests import SubmitBatch
from rollout.chat.accept import ask, with_prompts
from rollout.environments.base import Context, Step, TurnResult
from rollout.environments.base import Environment as Base
from rollout.generation.async_engine import AsyncEngine
from rollout.trajectory.rollout import Rollout
from tests.fake_runner import FakeRunner, FakeWeights, mix
from tests.rollout.build import spec
from tests.rollout.chat.tiny import COUNTING, THINKING, chat, ids, tokenizer
from tests.rollout.trajectory.test_state import plain

VOCAB = 512
END = tokenizer().special("<|im_end|>")
MODEL = ModelInfo(architecture="x", dtype="float32", vocab_size=VOCAB, max_context=2048, eos_ids=(END,))
SAMPLES = 6
SAYS = [*ids("</result>"), *ids("<think>\nhm\n</think>\n\n"), *ids("21 degrees")]


class Slow(FakeRunner):
    """Says words of a few, at a pace at which it can be disturbed. Its texts are full of stop strings cut in two."""

    def __init__(self) -> None:
        super().__init__(num_blocks=400, vocab_size=VOCAB, script=self._says)

    def _says(self, params: SamplingParams, position: int) -> int:
        chance = mix(params.seed, params.sample_index, params.segment, position)
        return END if chance % 23 == 0 else SAYS[(position + chance % 2) % len(SAYS)]

    def finish(self, ticket: Any) -> Any:
        time.sleep(0.0005)
        return super().finish(ticket)


class Talker(Base):
    """What it says depends on the turn alone."""

    chat_roles = ("user", "tool")
    on_length = "continue"
    stateless = True

    async def reset(self, context: Context) -> None:
        self.chat = context.chat

    async def step(self, turn: TurnResult) -> Step:
        assert self.chat is not None
        chance = random.Random(zlib.crc32(turn.token_ids.tobytes()))
        await asyncio.sleep(chance.choice((0, 0, 0.004)))
        role = chance.choice(("user", "tool"))
        more = [{"role": role, "content": "and " * chance.randrange(9)}] if chance.random() < 0.9 else []
        return await self.chat.follow(turn, *more, max_tokens=chance.choice((None, 3, 16)))


class Books(AsyncEngine):
    """Writes down what every trajectory asked and got."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.entries: dict[str, list[tuple[Request, Completion]]] = defaultdict(list)

    async def generate(self, request: Request) -> Completion:
        completion = await super().generate(request)
        self.entries[request.trajectory].append((request, completion))
        return completion


async def started() -> Books:
    runner = Slow()
    config = EngineConfig(max_running=SAMPLES, max_context=2048)
    table = tokenizer().token_bytes(VOCAB)
    engine = Books(ThreadEngine(Engine(runner, config, table), FakeWeights(runner)))
    await engine.start()
    return engine


def group(how: str, seed: int) -> tuple[Group, Any]:
    form = chat(COUNTING if how == "branch" else THINKING)
    template = {"keep": {}, "drop": {"on_user_turn": "drop"}, "branch": {"on_unstable": "branch"}}[how]
    made = Group(
        id="g",
        messages=({"role": "user", "content": "hello"},),
        trajectory_ids=tuple(f"{how}{seed}-{i}" for i in range(SAMPLES)),
        template=Template(**template),  # type: ignore[arg-type]
        sampling=Sampling(max_tokens=40, stop=("degrees</res", "\n</think>\n\n21 d", "t></re"), presence_penalty=0.5),
        budget=Budget(max_turns=5, max_total_tokens=600),
        environment=Environment(name="talker"),
    )
    submit = SubmitBatch(id="1", batch_id="b", groups=(made,))
    return with_prompts(submit, form, ask(submit, lambda _: Talker)).groups[0], form


async def run_one(engine: Books, of: Group, form: Any, index: int, chance: random.Random | None) -> Record:
    """Disturbed where there is a `chance`."""
    before: Record | None = None
    while True:
        made = spec(
            of, trajectory_id=of.trajectory_ids[index], sample_index=index, order=index, before=before, resumable=True
        )
        rollout = Rollout(
            made, engine=engine, environment=Talker, model=MODEL, on_turn=print, tokenizer=tokenizer(), chat=form
        )
        running = asyncio.ensure_future(rollout.run())
        if chance is not None:
            await disturb(rollout, running, chance)
        record = await running
        if record.status != "aborted":
            return record
        assert record.partial is not None
        before = record


async def disturb(rollout: Rollout, running: asyncio.Task[Record], chance: random.Random) -> None:
    for _ in range(chance.randrange(4)):
        await asyncio.wait({running}, timeout=chance.random() * 0.02)
        if running.done():
            return
        if chance.random() < 0.5:
            rollout.cancel("abort_surplus")
            return
        rested = asyncio.Event()
        rollout.park(rested.set)
        rest = asyncio.ensure_future(rested.wait())
        await asyncio.wait({running, rest}, return_when=asyncio.FIRST_COMPLETED)
        rest.cancel()
        await asyncio.sleep(chance.random() * 0.005)
        rollout.unpark()


@pytest.mark.parametrize("how", ["keep", "drop", "branch"])
def test_every_token_is_accounted_for(how: str) -> None:
    async def body(chance: random.Random | None) -> tuple[list[Record], Books]:
        engine = await started()
        of, form = group(how, 3)
        tasks = (run_one(engine, of, form, i, chance) for i in range(SAMPLES))
        records = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert await engine.close(10)
        return list(records), engine

    whole, books = asyncio.run(body(None))
    for record in whole:
        balance(record, books)
    assert any(turn.stop and not turn.stop.isdigit() for record in whole for turn in turns_of(record)), "no stop string"
    assert any(len(turns_of(record)) > 2 for record in whole)
    assert any(len(record.segments) > 1 for record in whole) == (how != "keep")
    disturbed, books = asyncio.run(body(random.Random(how)))
    cuts = sum(len(entries) for entries in books.entries.values()) - sum(len(turns_of(record)) for record in disturbed)
    assert cuts > 0, "nothing was disturbed"
    for record, expected in zip(disturbed, whole, strict=True):
        balance(record, books)
        assert [plain(segment) for segment in record.segments] == [plain(segment) for segment in expected.segments]
        assert (record.finish_reason, record.truncation) == (expected.finish_reason, expected.truncation)


def turns_of(record: Record) -> list[Any]:
    return [turn for segment in record.segments for turn in segment.turns]


def balance(record: Record, books: Books) -> None:
    assert sum(record.times.model_dump().values()) == pytest.approx(record.wall_s, rel=0.01, abs=1e-6)
    entries = books.entries[f"s/{record.trajectory_id}"]
    for (before, got), (after, _) in itertools.pairwise(entries):
        if before.params.segment == after.params.segment:
            held = np.concatenate([before.token_ids, got.token_ids])
            np.testing.assert_array_equal(after.token_ids[: len(held)], held)
    for k, segment in enumerate(record.segments):
        mine = [(request, got) for request, got in entries if request.params.segment == k]
        mask = np.zeros(len(segment.token_ids), np.uint8)
        logprobs = np.zeros(len(segment.token_ids), np.float32)
        for request, got in mine:
            span = slice(len(request.token_ids), len(request.token_ids) + len(got.token_ids))
            np.testing.assert_array_equal(segment.token_ids[span], got.token_ids)
            mask[span] = 1
            logprobs[span] = got.logprobs["processed"]
        np.testing.assert_array_equal(segment.loss_mask, mask)
        np.testing.assert_array_equal(segment.loss_mask, segment.source == SOURCE_SAMPLED)
        np.testing.assert_array_equal(segment.logprobs, logprobs)
        assert sum(turn.length for turn in segment.turns) == mask.sum()
        if mine:
            held = mine[-1][0].token_ids
            np.testing.assert_array_equal(segment.token_ids[: len(held)], held)

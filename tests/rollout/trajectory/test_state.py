"""Conversations that were cut anywhere and went on elsewhere: bit for bit what they would have been uncut."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.request import Completion, Request
from protocols import fields
from protocols.codec import decode_reply, encode
from protocols.errors import BadRequest
from protocols.fields import Environment as Asked
from protocols.fields import Group, Limits, Partial, Record, Sampling, Segment
from protocols.replies import TrajectoryDone, TurnDone
from protocols.requests import Continue, SubmitBatch
from rollout.batches.partials import check_partials
from rollout.chat.accept import ask, with_prompts
from rollout.environments.base import Context, Environment, EnvironmentSource, Step, TurnResult
from rollout.environments.registry import Registry
from rollout.generation.async_engine import AsyncEngine
from rollout.tools.environment import Episode
from rollout.tools.modules import ModuleTools
from rollout.trajectory.rollout import Rollout
from rollout.trajectory.state import SAID_BYTES, SNAPSHOT_BYTES, TOKEN_BYTES, state_bytes
from tests.rollout.build import spec
from tests.rollout.chat.tiny import COUNTING, THINKING, chat, ids, tokenizer
from tests.rollout.stub_engine import StubEngine
from tests.rollout.tools.play import CONTEXT, END, chat_group, run
from tests.rollout.tools.sample_tools import lookup

CALL = '<tool_call>{"name": "lookup", "arguments": {"key": 4}}</tool_call>'
PHRASES = [
    [*ids(text), END]
    for text in (
        "<think>\nhm\n</think>\n\nthe answer",
        "no thought",
        CALL,
        f"<think>why</think>{CALL}{CALL}",
        "<tool_call>{oops</tool_call>",
    )
] + [[*ids("h"), *ids("e"), *ids("lo"), END]]
"""The last one is a text that is encoded otherwise."""


def replies(request: Request) -> tuple[list[int], np.ndarray]:
    """The rest of a turn and its logprobs, a function of the turn's context, the seeds and the segment alone."""
    length = len(request.token_ids)
    start = length if request.sampled is None else int(np.flatnonzero(~request.sampled)[-1]) + 1
    params = request.params
    key = f"{request.token_ids[:start].tolist()} {params.seed} {params.sample_index} {params.segment}"
    noise = zlib.crc32(key.encode())
    said = PHRASES[noise % len(PHRASES)]
    assert said[: length - start] == request.token_ids[start:].tolist(), "the turn goes on with other tokens"
    rest = said[length - start :][: request.max_tokens]
    at = np.arange(length, length + len(rest))
    return rest, (-(at % 16 + 1 + noise % 7) / 16).astype(np.float32)


@dataclass
class Cut:
    """after: tokens that this run may sample. late: it comes with the next request, not with the last token."""

    after: int = 10**9
    late: bool = False
    left: int = field(init=False)
    rollout: Rollout = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.after

    def __call__(self, request: Request) -> Completion:
        said, logprobs = replies(request)
        count = min(self.left, len(said))
        over = count == self.left and not (self.late and count == len(said) > 0)
        self.left -= count
        if over:
            self.rollout.cancel("abort_surplus")
        ended = "stop" if said[count - 1] == END else "length"
        return Completion(
            request.id,
            ended if count == len(said) else "abort_client",  # type: ignore[arg-type]
            np.array(said[:count], np.int32),
            dict.fromkeys(request.logprob_modes, logprobs[:count]),
            weight_versions=((0, count),) if count else (),
            kv_version=0,
            stop=END if count == len(said) and ended == "stop" else None,
        )


class Tools(ModuleTools):
    """Scores how much it was told, and says it all."""

    tools = (lookup,)

    def reply(self, episode: Episode) -> str | None:
        return f"and after {episode.answer!r}?"

    def reward(self, episode: Episode) -> dict[str, float]:
        told = json.dumps([list(episode.messages), episode.answer, [dataclasses.astuple(r) for r in episode.results]])
        return {"told": float(zlib.crc32(told.encode())), "messages": float(len(episode.messages))}


class Saved(Environment):
    """Two user turns for each answer in which it counts; done by what it has counted."""

    chat_roles = ("user",)
    on_length = "continue"

    def reset(self, context: Context) -> None:
        self.chat, self.letters = context.chat, 0

    def step(self, turn: TurnResult) -> Awaitable[Step]:
        assert self.chat is not None
        self.letters += len(self.chat.text(turn))
        if self.letters > 300:
            return self.chat.follow(turn, reward=1.0)
        more = {"role": "user", "content": f"{self.letters}, {len(self.chat.messages)}"}
        return self.chat.follow(turn, more, more, reward=0.5)

    def snapshot(self) -> dict[str, Any]:
        return {"letters": self.letters}

    def restore(self, context: Context, state: Mapping[str, Any]) -> None:
        self.chat, self.letters = context.chat, state["letters"]

    def finish(self, record: Record) -> float:  # noqa: ARG002
        assert self.chat is not None
        return float(zlib.crc32(json.dumps(self.chat.messages).encode()))


class Apart(Saved):
    isolation = "process"


class Stateless(Environment):
    """All there is to know is in the turn and the conversation."""

    chat_roles = ("user",)
    stateless = True

    async def reset(self, context: Context) -> None:
        self.chat = context.chat

    async def step(self, turn: TurnResult) -> Step:
        assert self.chat is not None
        more = {"role": "user", "content": f"{len(self.chat.messages)} so far"}
        return await self.chat.follow(turn, *([more] if len(self.chat.messages) < 9 else []))


class StatelessApart(Stateless):
    isolation = "process"


@dataclass
class Case:
    """make: the environment's class, or the name of a built-in one."""

    make: Any
    jinja: str = THINKING
    fields: dict[str, Any] = field(default_factory=dict)

    def group(self) -> Group:
        return chat_group(sampling=Sampling(max_tokens=40), budget={"max_turns": 6}, **self.fields)


SCRIPT = tuple(fields.ScriptedTurn(observation=np.array(ids(f"more {k}"), np.int32)) for k in range(3))
CASES = {
    "tools": Case(Tools),
    "tools, drop": Case(Tools, fields={"template": {"on_user_turn": "drop"}}),
    "tools, branch": Case(Tools, COUNTING, {"template": {"on_unstable": "branch"}}),
    "snapshots": Case(Saved),
    "snapshots, drop": Case(Saved, fields={"template": {"on_user_turn": "drop"}}),
    "stateless": Case(Stateless, fields={"template": {"options": {"enable_thinking": False}}}),
    "stateless, branch": Case(Stateless, COUNTING, {"template": {"on_unstable": "branch"}}),
    "scripted": Case("scripted", fields={"environment": Asked(name="scripted", script=SCRIPT)}),
    "remote": Case("remote", fields={"environment": Asked(name="remote")}),
}
APART = {
    "process": Case(Apart),
    "process, drop": Case(Apart, fields={"template": {"on_user_turn": "drop"}}),
    "process, stateless, branch": Case(StatelessApart, COUNTING, {"template": {"on_unstable": "branch"}}),
}


form = functools.cache(chat)
"""Its proofs take most of the time."""


class Worker:
    def __init__(self, case: Case, registry: Registry | None = None) -> None:
        self.case, self.form, self.registry = case, form(case.jinja), registry

    def resolve(self, environment: Asked) -> EnvironmentSource:
        if environment.name in ("scripted", "remote"):
            return Registry({}).resolve(environment)
        if self.registry is not None:
            return self.registry.resolve(Asked(name=self.case.make.__name__))
        made: EnvironmentSource = self.case.make
        return made

    def accepted(self, group: Group, before: Record | None = None) -> Group:
        submit = SubmitBatch(id="1", batch_id="b", groups=(group,), partials=() if before is None else (before,))
        submit = with_prompts(submit, self.form, ask(submit, self.resolve))
        check_partials(submit, model=CONTEXT, resolve=self.resolve)
        return submit.groups[0]

    async def run(self, cut: Cut, before: Record | None = None, *, resumable: bool = True) -> Record:
        group = self.case.group()
        if before is not None:
            group = group.model_copy(update={"sampling": before.sampling})
        made = spec(self.accepted(group, before), before=before, resumable=resumable, sample_index=0)
        engine = AsyncEngine(StubEngine(cut))
        await engine.start()

        def asked(turn: TurnDone) -> None:
            """The trainer: what it says depends on the turn alone."""
            done = turn.turn.index == 3
            said = None if done else np.array(ids(f"then {turn.total_len}"), np.int32)
            answer = Continue(
                id="x",
                trajectory_id="t",
                turn=turn.turn.index,
                expected_len=turn.total_len,
                observation=said,
                done=done,
                reward=float(turn.total_len) if done else None,
            )
            asyncio.get_running_loop().call_soon(cut.rollout.answer, answer)

        cut.rollout = Rollout(
            made,
            engine=engine,
            environment=self.resolve(group.environment),
            model=CONTEXT,
            on_turn=asked,
            tokenizer=tokenizer(),
            chat=self.form,
        )
        record = await cut.rollout.run()
        frames = [memoryview(bytes(frame)) for frame in encode(TrajectoryDone(id="1", record=record))]
        sent = decode_reply(frames, Limits())
        assert isinstance(sent, TrajectoryDone)
        return sent.record


def plain(segment: Segment) -> dict[str, Any]:
    """All of it but what tells of time and work."""
    arrays = {name: value for name, value in segment if isinstance(value, np.ndarray)}
    turns = [(t.index, t.start, t.length, t.finish_reason, t.stop, t.reward, t.prompt_len) for t in segment.turns]
    return {name: (value.dtype, value.shape, value.tobytes()) for name, value in arrays.items()} | {"turns": turns}


def same(one: Record, other: Record) -> bool:
    assert [plain(segment) for segment in one.segments] == [plain(segment) for segment in other.segments]
    rest = ("status", "finish_reason", "reward", "rewards", "sampling", "truncation", "sample_index", "partial")
    assert [getattr(one, name) for name in rest] == [getattr(other, name) for name in rest]
    return True


def sampled(record: Record) -> int:
    return sum(turn.length for segment in record.segments for turn in segment.turns)


async def everywhere(worker: Worker, every: int) -> Record:
    """Cut after so many tokens, and at every end of a turn: with its last token, and when the next turn begins."""
    whole = await worker.run(Cut())
    ends = np.cumsum([turn.length for segment in whole.segments for turn in segment.turns]).tolist()[:-1]
    cuts = {(after, False) for after in (*range(0, sampled(whole), every), *ends)} | {(end, True) for end in ends}
    for after, late in sorted(cuts):
        cut = await worker.run(Cut(after, late))
        assert (cut.status, sampled(cut)) == ("aborted", after)
        assert cut.partial is not None
        assert same(await worker.run(Cut(), cut), whole), (after, late)
    return whole


@pytest.mark.parametrize("name", CASES)
def test_it_may_be_cut_after_any_token_and_between_any_two_turns(name: str) -> None:
    whole = run(everywhere(Worker(CASES[name]), 5))
    assert whole.status == "completed", whole.error
    assert len([turn for segment in whole.segments for turn in segment.turns]) >= 4
    assert (len(whole.segments) > 1) == ("drop" in name or "branch" in name)


@pytest.mark.parametrize("name", APART)
def test_in_a_process_of_its_own_too(name: str) -> None:
    async def body() -> Record:
        registry = Registry({case.make.__name__: case.make for case in APART.values()}, processes=4)
        try:
            return await everywhere(Worker(APART[name], registry), 30)
        finally:
            await registry.close()

    whole = run(body())
    assert whole.status == "completed", whole.error
    assert (len(whole.segments) > 1) == ("branch" in name or "drop" in name)


def test_it_may_be_cut_again_and_again() -> None:
    case = CASES["tools, drop"]

    async def body() -> None:
        whole = await Worker(case).run(Cut())
        for step in (1, 5, 11):
            record = await Worker(case).run(Cut(step))
            while record.status == "aborted":
                assert record.partial is not None
                record = await Worker(case).run(Cut(step, late=step > 1), record)
            assert same(record, whole)

    run(body())


@pytest.mark.parametrize("template", [{}, {"on_user_turn": "drop"}], ids=["keep", "drop"])
def test_it_may_be_cut_when_its_environment_has_answered(template: dict[str, Any]) -> None:
    """A segment that has begun and holds nothing that was sampled is in its record too."""
    fields: dict[str, Any] = {"template": template}

    async def body() -> None:
        whole = await Worker(Case(Saved, fields=fields)).run(Cut())
        for answers in range(4):
            cut = Cut()

            class Stopping(Saved):
                kept = 0

                async def snapshot(self) -> dict[str, Any]:  # type: ignore[override]
                    if self.kept == answers:  # noqa: B023
                        cut.rollout.cancel("abort_surplus")  # noqa: B023
                    self.kept += 1
                    return super().snapshot()

            record = await Worker(Case(Stopping, fields=fields)).run(cut)
            assert record.partial is not None
            assert record.partial.answered
            assert sum(len(segment.turns) for segment in record.segments) == answers
            assert same(await Worker(Case(Saved, fields=fields)).run(Cut(), record), whole)

    run(body())


def cut_once(case: Case, cut: Cut, **how: Any) -> Record:
    record: Record = run(Worker(case).run(cut, **how))
    assert record.status == "aborted"
    return record


def test_a_state_that_cannot_be_sent_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a trajectory without it does not go on."""

    class Odd(Stateless):
        async def step(self, turn: TurnResult) -> Step:
            assert self.chat is not None
            return await self.chat.follow(turn, {"role": "user", "content": "more", "extra": (1, 2)})

    assert cut_once(Case(Odd), Cut(3)).partial is not None
    assert cut_once(Case(Odd), Cut(26)).partial is None
    monkeypatch.setattr("rollout.trajectory.state.SAID_BYTES", -SNAPSHOT_BYTES)
    monkeypatch.setattr("rollout.trajectory.state.TOKEN_BYTES", 0)
    for case in ("tools", "stateless"):
        assert cut_once(CASES[case], Cut(26)).partial is None


@pytest.mark.parametrize(
    ("state", "goes_on"), [("deep", False), ("large", False), ("as deep", True), ("as large", True)]
)
def test_nor_is_a_state_that_whoever_receives_it_would_refuse(state: str, goes_on: bool) -> None:
    """`Worker.run` sends each record, and reads it."""
    limits, few = Limits(), state.startswith("as")

    class Odd(Saved):
        def snapshot(self) -> dict[str, Any]:
            told: dict[str, Any] = {"letters": self.letters}
            if "large" in state:
                return told | {"text": "x" * (limits.max_metadata - 100 if few else limits.max_metadata)}
            for _ in range(limits.max_nesting - few):
                told = {"inner": told}
            return told

    assert (cut_once(Case(Odd), Cut(14)).partial is not None) == goes_on


def test_where_no_state_is_asked_for_only_what_has_none_goes_on() -> None:
    """Nothing is known of a conversation, or of an environment, of which nothing was kept: not even where it was when
    it began."""
    for name, goes_on in (("scripted", True), ("remote", True), ("stateless", False), ("snapshots", False)):
        assert (cut_once(CASES[name], Cut(26), resumable=False).partial is not None) == goes_on, name
    for name, goes_on in (("stateless", True), ("snapshots", False)):
        assert (cut_once(CASES[name], Cut(1), resumable=False).partial is not None) == goes_on, name
    first = cut_once(CASES["snapshots"], Cut(14))
    assert first.partial is not None
    again = run(Worker(CASES["snapshots"]).run(Cut(12), first, resumable=False))
    assert (again.status, again.partial) == ("aborted", None)


def test_a_conversation_that_stops_before_it_goes_on_is_as_it_was() -> None:
    record = cut_once(CASES["tools, drop"], Cut(40))
    waiting = Cut()

    class Stopped(Tools):
        async def restore(self, context: Context, state: Mapping[str, Any]) -> None:
            waiting.rollout.cancel("abort_surplus")
            await super().restore(context, state)

    again = run(Worker(Case(Stopped, fields=CASES["tools, drop"].fields)).run(waiting, record))
    assert same(again, record)


def test_the_room_for_a_state_is_that_of_its_kind() -> None:
    plain = Group(id="g", prompt=np.array([1], np.int32), trajectory_ids=("t",), environment=Asked(name="other"))
    assert state_bytes(plain, 1000) == SNAPSHOT_BYTES
    assert state_bytes(plain.model_copy(update={"environment": Asked(name="remote")}), 1000) == 0
    assert state_bytes(chat_group(), 1000) == SNAPSHOT_BYTES + SAID_BYTES + 1000 * TOKEN_BYTES
    assert (
        state_bytes(chat_group(budget={"max_total_tokens": 9}), 1000) == SNAPSHOT_BYTES + SAID_BYTES + 9 * TOKEN_BYTES
    )


# Refused.


def json_blob(value: Any) -> np.ndarray:
    return np.frombuffer(value if isinstance(value, bytes) else json.dumps(value).encode(), np.uint8)


REFUSED: list[tuple[str, Callable[[Record], dict[str, Any]]]] = [
    ("partial.messages", lambda r: _partial(r, messages=json_blob(b"[{"))),
    ("partial.messages", lambda r: _partial(r, messages=json_blob(b"\xff"))),
    ("partial.messages", lambda r: _partial(r, messages=json_blob(b"[" * 10**5))),
    ("partial.messages", lambda r: _partial(r, messages=json_blob({"role": "user"}))),
    (
        "partial.messages",
        lambda r: _partial(r, messages=json_blob(b'[{"role": "user", "content": "x", "extra": NaN}]')),
    ),
    ("partial.messages", lambda r: _partial(r, messages=json_blob(b'[{"role": "user", "content": "\\ud800"}]'))),
    ("partial.messages[1].content", lambda r: _partial(r, messages=json_blob([_said("user"), {"role": "user"}]))),
    ("partial.messages[0].role", lambda r: _partial(r, messages=json_blob([{"role": "a b", "content": "x"}]))),
    ("partial.snapshot", lambda r: _partial(r, snapshot=None)),
    ("partial.answered", lambda r: {"segments": (*r.segments, _empty(r.segments[-1]))}),
    ("segments", lambda r: {"segments": (*r.segments[:1] * 8, r.segments[-1])}),
    ("segments[0].turns", lambda r: {"segments": (_empty(r.segments[0]), *r.segments[1:])}),
    ("segments[0].turns", lambda r: {"segments": r.segments[1:]}),
    ("segments[0].token_ids", lambda r: {"segments": (_shifted(r.segments[0]), *r.segments[1:])}),
    ("segments[1].token_ids", lambda r: {"segments": (r.segments[0], _outside(r.segments[1]), *r.segments[2:])}),
]


def _partial(record: Record, **changes: Any) -> dict[str, Any]:
    assert record.partial is not None
    return {"partial": Partial(**{**dict(record.partial), **changes})}


def _said(role: str) -> dict[str, str]:
    return {"role": role, "content": "x"}


def _empty(segment: Segment) -> Segment:
    return segment.model_copy(update={"turns": ()})


def _shifted(segment: Segment) -> Segment:
    return segment.model_copy(update={"token_ids": np.roll(segment.token_ids, 1)})


def _outside(segment: Segment) -> Segment:
    return segment.model_copy(update={"token_ids": segment.token_ids + 10**6})


@pytest.fixture(scope="module")
def branched() -> Record:
    """One of several segments."""
    record = cut_once(CASES["tools, drop"], Cut(40))
    assert len(record.segments) > 1
    return record


@pytest.mark.parametrize(("where", "change"), REFUSED)
def test_what_is_not_of_its_trajectory_is_refused_by_name(
    branched: Record, where: str, change: Callable[[Record], dict[str, Any]]
) -> None:
    worker = Worker(CASES["tools, drop"])
    group = worker.case.group().model_copy(update={"sampling": branched.sampling})
    worker.accepted(group, branched)
    with pytest.raises(BadRequest) as refused:
        worker.accepted(group, branched.model_copy(update=change(branched)))
    assert refused.value.field == f"partials[0].{where}"


def test_segments_and_messages_belong_to_conversations_that_have_them(branched: Record) -> None:
    keeping = Worker(CASES["tools"])
    group = keeping.case.group().model_copy(update={"sampling": branched.sampling})
    with pytest.raises(BadRequest) as refused:
        keeping.accepted(group, branched)
    assert refused.value.field == "partials[0].segments"
    prompt = keeping.accepted(group).prompt
    bare = group.model_copy(update={"messages": None, "tools": (), "prompt": prompt, "environment": Asked()})
    record = branched.model_copy(update={"segments": branched.segments[:1]})
    with pytest.raises(BadRequest) as refused:
        Worker(CASES["scripted"]).accepted(bare, record)
    assert refused.value.field == "partials[0].partial.messages"


def test_messages_that_become_another_prompt_are_refused() -> None:
    """As where the template prints the date, or the worker has other tools."""
    record = cut_once(CASES["stateless"], Cut(26))
    other = Worker(Case(Stateless, THINKING.replace("<|im_start|>assistant", "<|im_start|> assistant")))
    group = CASES["stateless"].group().model_copy(update={"sampling": record.sampling})
    with pytest.raises(BadRequest, match="as the chat template and the tools here make it") as refused:
        other.accepted(group, record)
    assert refused.value.field == "partials[0].segments[0].token_ids"

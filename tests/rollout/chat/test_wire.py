"""Messages through a whole worker: refused by name, rendered once, idempotent, and off the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engine.request import Request
from protocols.errors import BadRequest, PromptTooLong
from protocols.fields import Group, ModelInfo, Record, Truncation
from rollout.chat import aside
from rollout.chat.accept import check_at_start
from rollout.chat.errors import ChatError
from rollout.chat.format import ChatFormat
from rollout.chat.template import ChatTemplate
from rollout.client import RolloutClient, Trajectory
from rollout.environments.base import Context, Environment, Step, TurnResult
from rollout.environments.registry import Registry
from rollout.service.service import Served
from rollout.tools.environment import ToolEnvironment
from rollout.tools.modules import environment_of
from rollout.trajectory.segments import MAX_SEGMENTS
from tests.rollout.chat.tiny import COUNTING, THINKING, chat, ids, tokenizer
from tests.rollout.raw_client import RawClient
from tests.rollout.timed_engine import VOCAB, TimedEngine
from tests.rollout.tools.sample_tools import lookup
from tests.rollout.workers import WorkerThread, eventually, worker

USER = {"role": "user", "content": "hello <|im_end|>"}
MODEL = ModelInfo(architecture="stub", dtype="float32", vocab_size=VOCAB, max_context=2048)


class Tools(ToolEnvironment):
    tools = (lookup,)


class Chatty(Environment):
    """A plug-in that goes on in messages, twice."""

    chat_roles = ("user",)
    stateless = True

    async def reset(self, context: Context) -> None:
        self.context = context

    async def step(self, turn: TurnResult) -> Step:
        assert self.context.chat is not None
        more = [{"role": "user", "content": f"turn {turn.index}"}] if turn.index < 2 else []
        return await self.context.chat.follow(turn, *more)


def served(form: ChatFormat | None, *, modules: tuple[str, ...] = (), **plugins: Any) -> Served:
    tools = environment_of(modules) if modules else None
    registry = Registry({"chatty": Chatty, "calls": Tools, **plugins}, tools=tools)
    return Served(MODEL, 0, "stub:start", registry, tokenizer(), form)


@pytest.fixture(scope="module")
def serving() -> Iterator[WorkerThread]:
    with worker(TimedEngine(), what=served(chat())) as thread:
        yield thread


@pytest.fixture
def client(serving: WorkerThread) -> Iterator[RolloutClient]:
    with RolloutClient(serving.address) as made:
        yield made


def only(client: RolloutClient, **fields: Any) -> Trajectory:
    (trajectory,) = client.submit(client.group(max_tokens=4, **fields))
    return trajectory


def test_a_scripted_group_with_messages(client: RolloutClient) -> None:
    form = chat()
    trajectory = only(client, messages=[USER], template_options={"enable_thinking": False})
    prompt = form.form((), {"enable_thinking": False}).prompt([USER])
    np.testing.assert_array_equal(trajectory.prompt_ids, prompt)
    assert trajectory.prompt_ids.tolist().count(tokenizer().special("<|im_end|>")) == 1
    assert trajectory.source[: len(prompt)].tolist() == [0] * len(prompt)


def test_a_plug_in_goes_on_in_messages(client: RolloutClient) -> None:
    trajectory = only(client, messages=[USER], environment="chatty", on_length="continue")
    assert trajectory.status == "completed", trajectory.error
    assert len(trajectory.turns) == 3
    first, second = trajectory.turns[:2]
    between = trajectory.token_ids[first.start + first.length : second.start]
    assert tokenizer().decode(between) == "<|im_end|>\n<|im_start|>user\nturn 0<|im_end|>\n<|im_start|>assistant\n"
    assert trajectory.loss_mask.sum() == sum(turn.length for turn in trajectory.turns)


def test_the_tools_of_the_environment_are_printed_unless_the_submit_names_others(client: RolloutClient) -> None:
    mine = [{"name": "mine", "parameters": {"type": "object"}}]
    for tools, shown, hidden in (([], '"lookup"', '"mine"'), (mine, '"mine"', '"lookup"')):
        trajectory = only(client, messages=[USER], tools=tools, environment="calls")
        text = tokenizer().decode(trajectory.prompt_ids)
        assert shown in text
        assert hidden not in text


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, BadRequest, "groups[0].messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, BadRequest, "groups[0].messages[0]"),
        ({"messages": [USER], "tools": [{}]}, BadRequest, "groups[0].tools[0]"),
        ({"messages": [USER], "template_options": {"tools": 1}}, BadRequest, "groups[0].template.options.tools"),
        ({"messages": [{"role": "user", "content": "x" * 9999}]}, PromptTooLong, "groups[0].messages"),
        ({"messages": [USER], "environment": "nobody"}, BadRequest, "groups[0].environment.name"),
        ({"messages": [USER], "environment": "tools"}, BadRequest, "groups[0].environment.name"),
        ({"prompt_ids": [1], "environment": "calls"}, BadRequest, "groups[0].prompt"),
        (
            {"messages": [USER], "environment": "calls", "config": {"tools": ["x"]}},
            BadRequest,
            "groups[0].environment.config.tools",
        ),
        *(
            (
                {"messages": [USER], "environment": "calls", "config": {name: value}},
                BadRequest,
                f"groups[0].environment.config.{name}",
            )
            for name, value in (
                ("tools", "lookup"),
                ("user", "one text would be said letter by letter"),
                ("user", [5]),
                ("max_bad_calls", "3"),
                ("max_bad_calls", -1),
                ("max_bad_calls", True),
            )
        ),
    ],
)
def test_what_is_refused_is_named(client: RolloutClient, fields: dict[str, Any], error: Any, field: str) -> None:
    with pytest.raises(error) as refused:
        client.submit(client.group(**fields))
    assert refused.value.field == field


class Misspelt(Chatty):
    chat_roles = ("usr",)


class Undeclared(Chatty):
    chat_roles = ("user",)

    async def step(self, turn: TurnResult) -> Step:
        assert self.context.chat is not None
        return await self.context.chat.follow(turn, {"role": "usr", "content": "lost"})


@pytest.mark.parametrize("on_unstable", ["refuse", "branch"])
def test_a_role_of_which_the_template_writes_nothing_is_named(on_unstable: str) -> None:
    what = served(chat(), misspelt=Misspelt, undeclared=Undeclared)
    how: dict[str, Any] = {"messages": [USER], "on_unstable": on_unstable, "on_length": "continue"}
    with worker(TimedEngine(), what=what) as thread, RolloutClient(thread.address) as client:
        with pytest.raises(
            BadRequest, match=r"'misspelt' appends messages of role 'usr', .* writes nothing"
        ) as refused:
            only(client, environment="misspelt", **how)
        assert refused.value.field == "groups[0].environment.name"
        failed = only(client, environment="undeclared", **how)
    assert (failed.finish_reason, len(failed.turns)) == ("env_error", 1)
    assert failed.error is not None
    assert "the chat template writes nothing of messages of role 'usr'" in failed.error.message


def test_such_a_role_is_refused_where_the_worker_starts() -> None:
    check_at_start({"one": ("user", "tool"), "none": ()}, chat())
    with pytest.raises(ValueError, match=r"environment 'misspelt' says in chat_roles that it appends .* role 'usr'"):
        check_at_start({"one": ("user",), "misspelt": ("tool", "usr")}, chat())
    with pytest.raises(ValueError, match=r"environment 'calls' .* role 'tool'"):
        check_at_start(
            {"calls": ("tool",)}, chat("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
        )
    check_at_start({"calls": ("tool",)}, chat("{{ broken"))
    told = "{% for m in messages if tools or m.role != 'tool' %}{{ m.content }}{% endfor %}"
    check_at_start({"calls": ("tool",)}, chat(told))


def test_a_checkpoint_without_a_template_takes_ids_only() -> None:
    with worker(TimedEngine(), what=served(None)) as thread, RolloutClient(thread.address) as client:
        with pytest.raises(BadRequest, match="no chat template") as refused:
            client.submit(client.group(messages=[USER]))
        assert refused.value.field == "groups[0].messages"
        assert only(client, prompt_ids=[1, 2]).ok


def test_a_template_that_cannot_append_is_refused_only_where_something_is_appended() -> None:
    with worker(TimedEngine(), what=served(chat(COUNTING))) as thread, RolloutClient(thread.address) as client:
        with pytest.raises(BadRequest, match="cannot be appended") as refused:
            client.submit(client.group(messages=[USER], environment="chatty"))
        assert refused.value.field == "groups[0].template.on_unstable"
        assert only(client, messages=[USER]).ok
        branching = {"environment": "chatty", "on_unstable": "branch", "on_length": "continue"}
        trajectory = only(client, messages=[USER], **branching)
        assert len(trajectory.segments) == 3
        assert all(segment.loss_mask.sum() == 4 for segment in trajectory.segments)


def test_a_repeat_is_the_same_even_where_the_template_prints_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    dated = "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate({"default": dated})
    monkeypatch.setattr("rollout.chat.sandbox._now", lambda form: f"{form}{next(clock)}")
    group = {"id": "g", "messages": [USER], "trajectory_ids": ["t"], "sampling": {"max_tokens": 4}}
    with (
        worker(TimedEngine(), what=served(ChatFormat(template, tokenizer()))) as thread,
        RawClient(thread.address) as client,
    ):
        client.call("hello", client="c")
        assert client.call("submit", batch_id="b", groups=[group])["known"] == 0
        assert client.call("submit", batch_id="b", groups=[group])["known"] == 1
        assert next(clock) > 1
        other = {**group, "messages": [{"role": "user", "content": "other"}]}
        assert client.call("submit", batch_id="b", groups=[other])["error"]["code"] == "duplicate"


def test_rendering_holds_up_nobody(serving: WorkerThread, client: RolloutClient) -> None:
    """The first submit is held inside of its template; another one and a ping go past it."""
    entered, release = threading.Event(), threading.Event()
    form = chat()

    class Slow(ChatTemplate):
        def render(self, *args: Any, **how: Any) -> str:
            entered.set()
            assert release.wait(20)
            return form.template.render(*args, **how)

    slow = ChatFormat(Slow({"default": ""}), tokenizer())
    serving.call(lambda service: setattr(service, "chat", slow))
    try:
        with RolloutClient(serving.address) as other:
            held = threading.Thread(target=only, args=(other,), kwargs={"messages": [USER]})
            held.start()
            assert entered.wait(10)
            assert only(client, prompt_ids=ids("x")).ok
            release.set()
            held.join(20)
            assert not held.is_alive()
    finally:
        release.set()
        serving.call(lambda service: setattr(service, "chat", chat()))


class Apart(Chatty):
    """The same in a process of its own."""

    isolation = "process"


def test_a_conversation_goes_on_in_the_process_of_its_environment() -> None:
    what = served(chat(), apart=Apart)
    with worker(TimedEngine(), what=what) as thread, RolloutClient(thread.address) as client:
        there = only(client, messages=[USER], environment="apart", on_length="continue")
        here = only(client, messages=[USER], environment="chatty", on_length="continue")
    assert there.status == "completed", there.error
    np.testing.assert_array_equal(there.token_ids, here.token_ids)
    assert len(there.turns) == 3


class Talkative(Chatty):
    """Never done."""

    async def step(self, turn: TurnResult) -> Step:
        assert self.context.chat is not None
        return await self.context.chat.follow(turn, {"role": "user", "content": f"turn {turn.index}"})

    async def finish(self, record: Record) -> float:
        return float(len(record.segments))


class TalkativeApart(Talkative):
    isolation = "process"


def test_a_conversation_that_branches_at_every_turn_ends_at_the_segment_limit_whole() -> None:
    what = served(chat(COUNTING), talkative=Talkative, apart=TalkativeApart)
    how: dict[str, Any] = {"messages": [USER], "on_unstable": "branch", "on_length": "continue", "max_tokens": 4}
    with worker(TimedEngine(), what=what) as thread, RolloutClient(thread.address) as client:
        groups = [client.group(environment=name, n=2, seed=5, **how) for name in ("talkative", "apart")]
        short = client.group(environment="talkative", max_turns=MAX_SEGMENTS, **how)
        ended = list(client.submit([*groups, short]))
    (fits,) = (t for t in ended if t.group_id == short.id)
    assert (fits.finish_reason, len(fits.segments), fits.reward) == ("max_turns", MAX_SEGMENTS, MAX_SEGMENTS)
    at_limit = [t for t in ended if t.group_id != short.id]
    assert len(at_limit) == 4
    for t in at_limit:
        assert (t.status, t.finish_reason, t.reward) == ("truncated", "length", MAX_SEGMENTS), t.error
        assert t.truncation == Truncation(limit="max_segments", value=MAX_SEGMENTS)
        assert [segment.loss_mask.sum() for segment in t.segments] == [4] * MAX_SEGMENTS
        assert len(t.turns) == MAX_SEGMENTS
        rendered = tokenizer().decode(t.segments[-1].token_ids[:-4])
        assert f"user {2 * MAX_SEGMENTS - 1}: turn {MAX_SEGMENTS - 2}<|im_end|>" in rendered
        assert rendered.endswith(f"assistant {2 * MAX_SEGMENTS}: ")
    first, *others = at_limit
    for other in others:
        np.testing.assert_array_equal(other.token_ids, first.token_ids)


class Later(TimedEngine):
    """First turns take no time, but that of "first", which ends a moment after the second one of another began."""

    def _seconds(self, request: Request) -> float:
        _, name, turn = request.id.split("/")
        return 1000.0 if name == "first" else 0.0 if turn == "0" else super()._seconds(request)

    def _begin(self, request: Request) -> None:
        super()._begin(request)
        session, _, turn = request.id.split("/")
        if turn == "1":
            self._later(0.15, lambda: self._expire(f"{session}/first/0"))


def everything(form: ChatFormat) -> Served:
    return served(form, modules=("tests.rollout.tools.sample_tools",), apart=Apart)


def cut_in_a_second_turn(environment: str, what: Served | None = None, **fields: Any) -> Trajectory:
    with worker(Later(0.1), what=what or everything(chat())) as thread, RolloutClient(thread.address) as client:
        first = client.group([1, 2], id="a", trajectory_ids=["first"], max_tokens=4)
        batch = client.submit([first, talk(client, environment, **fields)], groups_needed=1, surplus="return")
        return next(t for t in batch if t.trajectory_id == "t")


def talk(client: RolloutClient, environment: str, **fields: Any) -> Group:
    how: dict[str, Any] = {"messages": [USER], "environment": environment, "on_length": "continue", "max_tokens": 50}
    return client.group(id="g", trajectory_ids=["t"], seed=7, **{**how, **fields})


TALKS: list[tuple[str, dict[str, Any]]] = [
    ("chatty", {}),
    ("apart", {}),
    ("scripted", {"script": [ids("more"), ids("still more")]}),
    (
        "tools",
        {
            "config": {"user": ["And?", "And then?"], "tools": ["lookup"]},
            "template_options": {"enable_thinking": False},
        },
    ),
]


@pytest.mark.parametrize(("environment", "fields"), TALKS, ids=[name for name, _ in TALKS])
def test_a_conversation_that_was_returned_goes_on_in_another_worker(environment: str, fields: dict[str, Any]) -> None:
    cut = cut_in_a_second_turn(environment, **fields)
    assert (cut.finish_reason, cut.resumable, len(cut.turns)) == ("abort_surplus", True, 2)
    assert 0 <= cut.turns[-1].length < 50
    with worker(TimedEngine(), what=everything(chat())) as thread, RolloutClient(thread.address) as client:
        (whole,) = client.submit(talk(client, environment, **fields))
        (done,) = client.submit(resume=[cut])
    assert (done.ok, len(done.turns)) == (True, 3), done.error
    np.testing.assert_array_equal(done.token_ids, whole.token_ids)
    np.testing.assert_array_equal(done.source, whole.source)
    assert (done.finish_reason, done.sample_index, done.sampling.seed) == (whole.finish_reason, 0, 7)
    assert done.wall_s > cut.wall_s


def test_one_that_was_returned_goes_on_to_the_segment_limit() -> None:
    def made() -> Served:
        return served(chat(COUNTING), talkative=Talkative)

    cut = cut_in_a_second_turn("talkative", made(), on_unstable="branch")
    assert (cut.resumable, len(cut.segments)) == (True, 2)
    with worker(TimedEngine(), what=made()) as thread, RolloutClient(thread.address) as client:
        (done,) = client.submit(resume=[cut])
        (whole,) = client.submit(talk(client, "talkative", on_unstable="branch"))
    for t in (done, whole):
        assert t.truncation == Truncation(limit="max_segments", value=MAX_SEGMENTS), (t.finish_reason, t.error)
        assert len(t.segments) == len(t.turns) == t.reward == MAX_SEGMENTS
    np.testing.assert_array_equal(done.token_ids, whole.token_ids)


def test_what_cannot_go_on_is_refused_by_name() -> None:
    """An environment that does not say its state; messages that another template renders."""
    cut = cut_in_a_second_turn("calls", config={"user": ["And?"]})
    assert not cut.resumable
    other = cut_in_a_second_turn("chatty")
    what = everything(chat(THINKING.replace("assistant\\n", "assistant \\n")))
    with worker(TimedEngine(), what=what) as thread, RolloutClient(thread.address) as client:
        for trajectory, why, field in (
            (cut, "does not say its state", "resume[0]"),
            (other, "template", "partials[0].segments[0].token_ids"),
        ):
            with pytest.raises(BadRequest, match=why) as refused:
                client.submit(resume=[trajectory])
            assert refused.value.field == field


# What a client may send, and what a template may do.

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"in": schema}}
    return {"name": "deep", "parameters": schema}


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"messages": [{"role": "user", "content": "x" * 10 * 2**20}]}, "", "max_header"),
        ({"messages": [{"role": "user", "content": "x" * 5 * 2**20}]}, "groups[0].messages[0]", "max_chat"),
        ({"messages": [USER] * 10_000}, "groups[0].messages", "4096"),
        ({"messages": [USER], "tools": [nested(20)]}, "groups[0].tools[0]", "max_nesting"),
        ({"messages": [USER], "tools": [nested(3)] * 2000}, "groups[0].tools", "1024"),
        ({"messages": [USER], "template": {"options": {"x": "y" * 2**17}}}, "groups[0].template.options", "max_meta"),
    ],
)
def test_what_is_too_much_is_refused_before_it_is_rendered(
    serving: WorkerThread, fields: dict[str, Any], field: str, why: str
) -> None:
    """Whatever the client's own checks say."""
    with RawClient(serving.address) as client:
        client.call("hello", client="c")
        group = {"id": "g", "trajectory_ids": ["t"], **fields}
        client.send("submit", batch_id="b", groups=[group])
        # What is in a header beyond max_header is not looked at, its id included.
        error = client.wait(lambda message: message["type"] == "error", 20)["error"]
        assert error["code"] == "bad_request"
        assert why in error["message"], error
        assert (error["field"] or "").startswith(field)


def test_the_longest_messages_cost_nobody_else_anything(serving: WorkerThread) -> None:
    """They are refused, for no context is so long, and others are served meanwhile."""
    long = [{"role": "user", "content": "<|im_end|> the quick brown fox " * (2**19 // 31)} for _ in range(2)]
    refusals: list[BaseException] = []

    def submit() -> None:
        with RolloutClient(serving.address, timeout=60) as client, pytest.raises(PromptTooLong) as refused:
            client.submit(client.group(messages=long))
        refusals.append(refused.value)

    sending = threading.Thread(target=submit)
    sending.start()
    waits, served_meanwhile = [], 0
    with RolloutClient(serving.address) as client:
        while sending.is_alive():
            began = time.monotonic()
            client.ping()
            waits.append(time.monotonic() - began)
            served_meanwhile += only(client, messages=[USER]).ok
    sending.join()
    assert len(refusals) == 1
    assert served_meanwhile > 2
    assert sorted(waits)[len(waits) // 2] < 0.25


def test_a_template_that_does_not_end_costs_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no thread for ever: whoever sends ids, or asks next, is served."""
    monkeypatch.setattr(aside, "RENDER_S", 0.3)
    endless = ChatFormat(ChatTemplate({"default": ENDLESS}), tokenizer())
    with worker(TimedEngine(), what=served(endless)) as thread, RolloutClient(thread.address) as client:
        for _ in range(3):
            with pytest.raises(BadRequest, match="does not come to an end") as refused:
                client.submit(client.group(messages=[USER]))
            assert refused.value.field == "groups"
        assert only(client, prompt_ids=[1, 2]).ok
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "environment"])


def test_a_client_that_leaves_takes_its_rendering_with_it() -> None:
    endless = ChatFormat(ChatTemplate({"default": ENDLESS}), tokenizer())
    with worker(TimedEngine(), what=served(endless)) as thread:
        with RolloutClient(thread.address, timeout=0.3) as client, pytest.raises(TimeoutError):
            client.submit(client.group(messages=[USER]))
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "environment"])


def test_a_range_without_end_is_refused_by_the_sandbox() -> None:
    endless = chat("{% for i in range(10**9) %}{% endfor %}")
    with pytest.raises(ChatError, match="Range too big"):
        endless.form().prompt([USER])


class Hanging(Chatty):
    """Says what it takes when it is let go."""

    let_go = threading.Event()
    asked = threading.Semaphore(0)

    @classmethod
    def chat_roles(cls, config: Any) -> tuple[str, ...]:  # type: ignore[override]
        cls.asked.release()
        assert cls.let_go.wait(config["seconds"])
        return ()


@pytest.mark.parametrize("given", [{"messages": [USER]}, {"prompt_ids": [1, 2]}])
def test_a_class_that_does_not_say_what_it_takes_holds_up_nobody(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Hanging.let_go.clear()
    with worker(TimedEngine(), what=served(chat(), hanging=Hanging)) as thread:
        with RolloutClient(thread.address) as client, RolloutClient(thread.address) as other:
            batches: list[Any] = []
            group = client.group(environment="hanging", config={"seconds": 60.0}, max_tokens=4, **given)
            asking = threading.Thread(target=lambda: batches.append(client.submit(group)))
            asking.start()
            assert Hanging.asked.acquire(timeout=10)
            for _ in range(3):
                other.ping(timeout=5)
                assert only(other, messages=[USER]).ok
            Hanging.let_go.set()
            asking.join()
            assert [t.status for t in batches[0]] == ["truncated"]
        Hanging.let_go.clear()
        monkeypatch.setattr(aside, "RENDER_S", 0.1)
        with RolloutClient(thread.address) as client:
            with pytest.raises(BadRequest, match="hanging, and what these say of themselves") as refused:
                client.submit(client.group(environment="hanging", config={"seconds": 0.3}, **given))
            assert refused.value.field == "groups"
            assert only(client, prompt_ids=[1, 2]).ok
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "environment"])


def test_a_class_that_says_a_text_where_it_should_say_several_is_told() -> None:
    plugin = type("Texting", (Chatty,), {"chat_roles": classmethod(lambda _cls, _config: "user")})
    with worker(TimedEngine(), what=served(chat(), texting=plugin)) as thread, RolloutClient(thread.address) as client:
        with pytest.raises(BadRequest, match="chat_roles said 'user', not a tuple") as refused:
            only(client, environment="texting", messages=[USER])
        assert refused.value.field == "groups[0].environment.config"


@pytest.mark.parametrize("error", [ValueError("config.x must be 1 or 2"), KeyError("x"), SystemExit(3)])
@pytest.mark.parametrize("what", ["tool_schemas", "chat_roles"])
def test_a_class_that_takes_no_such_configuration_refuses_one_submit_and_not_the_worker(
    what: str, error: BaseException
) -> None:
    def fail(_cls: type, _config: Any) -> Any:
        raise error

    plugin = type("Refusing", (Chatty,), {what: classmethod(fail)})
    with worker(TimedEngine(), what=served(chat(), refusing=plugin)) as thread, RolloutClient(thread.address) as client:
        for given in ({"messages": [USER]}, {"prompt_ids": [1, 2]} if what == "chat_roles" else {"messages": [USER]}):
            with pytest.raises(BadRequest, match="environment 'refusing': ") as refused:
                only(client, environment="refusing", **given)
            assert refused.value.field == "groups[0].environment.config"
            assert type(error).__name__ in refused.value.message
        assert only(client, messages=[USER]).status == "truncated", "it lives"

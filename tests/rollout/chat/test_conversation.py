"""From turn to turn: what was sampled stays as it was, and a branch says so."""

from __future__ import annotations

import asyncio
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protocols.fields import Template, Turn
from rollout.chat.conversation import Conversation
from rollout.chat.errors import ChatError
from rollout.environments.base import Step, TurnResult
from tests.rollout.chat.tiny import COUNTING, THINKING, chat, ids, tokenizer

END = tokenizer().special("<|im_end|>")
USER = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": "and tomorrow?"}
RESULT = {"role": "tool", "content": "21"}


class Talk(Conversation):
    """Tells each turn what is before it, as a trajectory does."""

    held: np.ndarray

    def then(self, turn: TurnResult, *messages: Any, **how: Any) -> Step:
        step = asyncio.run(self.follow(replace(turn, before=self.held), *messages, **how))
        past = np.concatenate([self.held, turn.token_ids]) if step.branch is None else step.branch
        rest = [part for part in (step.glue, step.observation, step.opening) if part is not None]
        self.held = np.concatenate([past, *rest])
        return step


def conversation(template: str = THINKING, messages: Any = (USER,), options: Any = None, **how: Any) -> Talk:
    form = chat(template).form((), options or {})
    talk = Talk(form, messages, Template(**how))
    talk.held = form.prompt(messages)
    return talk


def turn(sampled: list[int], reason: Any = "stop") -> TurnResult:
    stop = str(sampled[-1]) if reason == "stop" else None
    made = Turn(index=0, start=0, length=len(sampled), finish_reason=reason, stop=stop)
    array = np.array(sampled, np.int32)
    return TurnResult(made, array, np.zeros(len(sampled), np.float32), len(sampled))


def said(text: str) -> TurnResult:
    return turn([*ids(text), END])


def added(step: Step) -> str:
    parts = [part for part in (step.glue, step.observation, step.opening) if part is not None]
    return tokenizer().decode(np.concatenate(parts))


THOUGHT = "<think>\nhm\n</think>\n\n21"


def test_a_new_user_turn_keeps_old_reasoning_by_default() -> None:
    talk = conversation()
    step = talk.then(said(THOUGHT), MORE)
    assert step.branch is None
    assert added(step) == "\n<|im_start|>user\nand tomorrow?<|im_end|>\n<|im_start|>assistant\n"
    assert talk.messages == [USER, {"role": "assistant", "content": THOUGHT}, MORE]


def test_a_new_user_turn_drops_it_in_a_branch() -> None:
    talk = conversation(on_user_turn="drop")
    step = talk.then(said(THOUGHT), MORE)
    whole = chat().template.render([USER, {"role": "assistant", "content": THOUGHT}, MORE])
    assert "hm" not in whole
    branch = np.asarray(step.branch)
    assert branch[-1] == END
    rest = [np.asarray(part) for part in (step.glue, step.observation, step.opening)]
    assert np.concatenate([branch, *rest]).tolist() == ids(whole)
    assert tokenizer().decode(rest[1]) == "and tomorrow?"


def test_a_branch_is_the_past_of_what_follows_it() -> None:
    """After it there is nothing more to drop: results append, and another user turn branches from the new past."""
    talk = conversation(on_user_turn="drop")
    talk.then(said(THOUGHT), MORE)
    step = talk.then(said("<think>\nagain\n</think>\n\n22"), RESULT)
    assert step.branch is None
    step = talk.then(said("done"), MORE)
    assert "again" not in tokenizer().decode(np.asarray(step.branch))


def test_where_there_is_nothing_to_drop_nothing_branches() -> None:
    talk = conversation(on_user_turn="drop")
    first = talk.then(said("no thought"), MORE)
    assert first.branch is None
    assert added(first) == added(conversation().then(said("no thought"), MORE))
    cut = talk.then(turn(ids("again none"), "length"), MORE)
    assert cut.branch is None
    assert np.asarray(cut.glue)[0] == END


def test_the_block_of_a_model_that_does_not_think_is_dropped_too() -> None:
    """It stands in the prompt, and never in history: the template's own quirk."""
    talk = conversation(options={"enable_thinking": False}, on_user_turn="drop")
    step = talk.then(said("21"), MORE)
    assert step.branch is not None
    assert added(step).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("how", [{}, {"on_user_turn": "drop"}], ids=["keep", "drop"])
def test_a_tool_loop_never_branches(how: dict[str, Any]) -> None:
    talk = conversation(**how)
    for text in (THOUGHT, "<think></think>odd\n\n\n", "none at all"):
        assert talk.then(said(text), RESULT, RESULT).branch is None


def test_ids_that_no_text_encodes_to_are_kept() -> None:
    """`h`, `i`: the text is theirs, and the ids of the text are others."""
    parts = [ids("h")[0], ids("e")[0], ids("l")[0], ids("lo")[0], END]
    assert ids("hello") != parts[:-1]
    talk = conversation()
    step = talk.then(turn(parts), MORE)
    assert step.branch is None
    assert talk.messages[1]["content"] == "hello"


def test_the_text_of_a_turn_lacks_only_the_token_that_ended_it() -> None:
    talk = conversation()
    assert talk.text(said("hello")) == "hello"
    assert talk.text(turn(ids("hello"), "length")) == "hello"
    assert talk.text(turn([*ids("hello"), END], "length")) == "hello<|im_end|>"
    assert talk.text(turn(ids("hello"))) == "hello"  # a stop id that is no control token
    assert talk.text(turn([], "length")) == ""


def test_without_messages_it_is_done() -> None:
    step = conversation().then(said("bye"), reward=0.5)
    assert (step.done, step.reward, step.glue) == (True, 0.5, None)


def test_a_template_that_cannot_append_refuses_or_branches_at_every_turn() -> None:
    with pytest.raises(ChatError, match="depends on the turn"):
        conversation(COUNTING).then(said("one"), MORE)
    talk = conversation(COUNTING, on_unstable="branch")
    for expected in (
        "user 1: hello<|im_end|>assistant 2: one<|im_end|>user 3: and tomorrow?<|im_end|>assistant 4: ",
        "user 1: hello<|im_end|>assistant 2: one<|im_end|>user 3: and tomorrow?<|im_end|>assistant 4: one<|im_end|>"
        "user 5: and tomorrow?<|im_end|>assistant 6: ",
    ):
        step = talk.then(said("one"), MORE)
        assert tokenizer().decode(np.asarray(step.branch)) + added(step) == expected


def test_wrong_messages_change_nothing() -> None:
    talk = conversation()
    with pytest.raises(ChatError):
        talk.then(said("x"), {"role": "user", "content": 5})
    assert talk.messages == [USER]


def test_what_cannot_be_appended_was_not_said() -> None:
    """An environment may try with something else."""
    talk = conversation(COUNTING)
    with pytest.raises(ChatError):
        talk.then(said("x"), MORE)
    assert talk.messages == [USER]
    assert talk.then(said("x")).done
    assert talk.messages == [USER, {"role": "assistant", "content": "x"}]


def test_what_is_before_a_turn_says_whether_the_template_rewrote_it() -> None:
    """An environment may have put ids of its own there."""
    talk = conversation(on_user_turn="drop")
    talk.held = np.concatenate([[7], talk.held]).astype(np.int32)
    assert talk.then(said("no thought"), MORE).branch is not None


def test_what_was_said_can_be_taken_up_by_another_one() -> None:
    first = conversation(on_user_turn="drop")
    first.then(said(THOUGHT), RESULT)
    texts = first.said()
    assert texts is not None
    assert [json.loads(text) for text in texts] == first.messages[1:]
    assert first.said(1) == texts[1:]
    assert first.said(2) == ()
    second = Talk(first.form, (USER,), Template(on_user_turn="drop"), [json.loads(text) for text in texts])
    second.held = first.held
    assert (second.messages, second.length) == (first.messages, 2)
    one, other = first.then(said("done"), MORE), second.then(said("done"), MORE)
    np.testing.assert_array_equal(one.branch, other.branch)
    assert one.branch is not None
    assert added(one) == added(other)
    assert first.said() == second.said()


@pytest.mark.parametrize("odd", [(1, 2), float("nan"), {1: 2}, b"x", {"a", "b"}, np.float32(1), "\ud800"])
def test_what_json_does_not_hold_as_it_is_cannot_be_taken_up(odd: Any) -> None:
    talk = conversation()
    talk.then(said("x"), {**RESULT, "extra": odd})
    assert talk.said() is None
    assert talk.said(2) == ()
    talk.then(said("x"), RESULT)
    assert talk.said(2) is not None


def test_in_another_process_it_goes_on_from_there() -> None:
    talk = Conversation(chat().form(), (USER,), Template())
    asyncio.run(talk.follow(said("x"), RESULT))
    there = pickle.loads(pickle.dumps(talk.sent(lambda form: Here())))  # noqa: ARG005
    assert (there.messages, there.length, there.said()) == (talk.messages, 2, talk.said())


class Here:
    def get(self) -> Any:
        return chat()


def test_a_turn_is_followed_once() -> None:
    """The second time, it would be said twice."""

    async def body() -> list[Any]:
        talk, turn = conversation(), said("hi")
        with pytest.raises(ChatError, match="must be a string"):
            await talk.follow(turn, {"role": "user", "content": 5})
        await talk.follow(turn, MORE)
        with pytest.raises(ChatError, match="said already: give all its messages at once"):
            await talk.follow(turn, MORE)
        await talk.follow(said("there"))
        return [message["content"] for message in talk.messages]

    assert asyncio.run(body()) == ["hello", "hi", "and tomorrow?", "there"]

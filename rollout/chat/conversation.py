"""One trajectory's conversation: the messages beside the ids, and the step from a sampled turn to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from engine.request import IntArray
from protocols.fields import Template
from rollout.chat.errors import ChatError
from rollout.chat.format import ChatFormat, Form, Suffix
from rollout.chat.messages import Message, checked_messages
from rollout.environments.base import Step, TurnResult


class SharedFormat(Protocol):
    """A format that several processes can read (environments/pool.py)."""

    def get(self) -> ChatFormat: ...


class Conversation:
    """messages: what was said so far. Sampled ids are decoded for them, and never encoded again, except where the
    conversation branches: there the template renders the messages anew, and the result begins a new segment.
    """

    def __init__(self, form: Form, messages: Sequence[Message], prompt: IntArray, template: Template) -> None:
        """prompt: int32[L], what `messages` were rendered to."""
        self.messages = list(messages)
        self.form = form
        self._held = prompt
        self._template = template

    def sent(self, share: Callable[[ChatFormat], SharedFormat]) -> Conversation:
        """The same, for another process: pickled it holds no tokenizer, but where that is shared."""
        return _Sent(share(self.form.chat), self.form, self.messages, self._held, self._template)

    def text(self, turn: TurnResult) -> str:
        """What the turn says, without the control token that ended it."""
        ids = turn.token_ids
        ended = len(ids) > 0 and turn.turn.stop == str(ids[-1]) and int(ids[-1]) in self.form.control
        return self.form.decode(ids[:-1] if ended else ids)

    def follow(
        self,
        turn: TurnResult,
        *messages: Mapping[str, Any],
        said: Message | None = None,
        reward: float | None = None,
        max_tokens: int | None = None,
        called: bool = False,
    ) -> Step:
        """What follows `turn`: `messages` are said, and the assistant is to answer. Called once a turn.

        said: the turn as a message; made of its text when None. Without messages the trajectory is done.
        Raises ChatError where the template does not take these messages, or cannot append them.
        """
        new = checked_messages(messages)
        held = np.concatenate([self._held, turn.token_ids])
        self.messages.append(said or {"role": "assistant", "content": self.text(turn)})
        if not new:
            return Step(done=True, reward=reward, called=called)
        branch, glue, suffix = self._after(turn, held, new)
        self.messages += new
        self._held = np.concatenate([held if branch is None else branch, glue, suffix.observation, suffix.opening])
        return Step(
            branch=branch,
            glue=glue,
            observation=suffix.observation,
            opening=suffix.opening,
            reward=reward,
            max_tokens=max_tokens,
            called=called,
        )

    def _after(
        self, turn: TurnResult, held: IntArray, new: Sequence[Message]
    ) -> tuple[IntArray | None, IntArray, Suffix]:
        """Ids of the branch, if one is needed, the glue, and the rest."""
        if self._template.on_user_turn == "keep" or all(message["role"] != "user" for message in new):
            try:
                suffix = self.form.suffix(new)
            except ChatError:
                if self._template.on_unstable == "refuse":
                    raise
            else:
                return None, suffix.after(turn.token_ids), suffix
        past, suffix = self.form.rendered_anew(self.messages, new)
        for same in (held, np.concatenate([held, suffix.closing])):
            if np.array_equal(past, same) and len(suffix.glue):
                return None, suffix.after(turn.token_ids), suffix
        return past, suffix.glue, suffix


class _Sent(Conversation):
    """Unpickled it is a `Conversation`."""

    def __init__(
        self, shared: SharedFormat, form: Form, messages: Sequence[Message], prompt: IntArray, template: Template
    ) -> None:
        super().__init__(form, messages, prompt, template)
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        form = self.form
        return _received, (self._shared, form.tools, form.options, self.messages, self._held, self._template)


def _received(
    shared: SharedFormat,
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    messages: Sequence[Message],
    prompt: IntArray,
    template: Template,
) -> Conversation:
    return Conversation(shared.get().form(tools, options), messages, prompt, template)

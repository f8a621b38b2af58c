"""One trajectory's conversation: the messages beside the ids, and the step from a sampled turn to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from engine.request import IntArray
from protocols.fields import Template
from rollout.chat.aside import RENDER_S
from rollout.chat.errors import ChatError
from rollout.chat.format import ChatFormat, Form, Suffix
from rollout.chat.messages import Message, all_as_json, checked_messages
from rollout.environments.base import Step, TurnResult
from rollout.environments.line import NOBODY, Owner


class SharedFormat(Protocol):
    """A format that several processes can read (environments/pool.py)."""

    def get(self) -> ChatFormat: ...


class Conversation:
    """messages: what was said so far. Sampled ids are decoded for them, and never encoded again, except where the
    conversation branches: there the template renders the messages anew, and the result begins a new segment.
    """

    def __init__(
        self,
        form: Form,
        submitted: Sequence[Message],
        template: Template,
        said: Sequence[Message] = (),
        owner: Owner = NOBODY,
    ) -> None:
        """submitted: the messages that the prompt was made of. said: what followed, where the trajectory goes on.

        owner: for whom it is rendered.
        """
        self.messages = [*submitted, *said]
        self.form = form
        self._begins = len(submitted)
        self._template = template
        self._owner = owner
        self._followed: TurnResult | None = None

    @property
    def may_branch(self) -> bool:
        """Can the template be asked to render what was said anew? Then a turn has to come with what is `before` it."""
        return self._template.may_branch

    @property
    def length(self) -> int:
        """Messages since the submitted ones."""
        return len(self.messages) - self._begins

    def said(self, since: int = 0) -> tuple[bytes, ...] | None:
        """What was said after the submitted messages and `since` others, each as JSON in UTF-8.

        None where that does not hold one of them: it could not be taken up elsewhere as it is here.
        """
        return all_as_json(self.messages[self._begins + since :])

    def sent(self, share: Callable[[ChatFormat], SharedFormat]) -> Conversation:
        """The same, for another process: pickled it holds no tokenizer, but where that is shared."""
        submitted, said = self.messages[: self._begins], self.messages[self._begins :]
        # Who holds the token of a session speaks for its client, and that process runs others' code.
        owner = Owner(hashlib.sha256(self._owner.session.encode()).hexdigest())
        return _Sent(share(self.form.chat), self.form, submitted, self._template, said, owner)

    def text(self, turn: TurnResult) -> str:
        """What the turn says, without the control token that ended it."""
        ids = turn.token_ids
        ended = len(ids) > 0 and turn.turn.stop == str(ids[-1]) and int(ids[-1]) in self.form.control
        return self.form.decode(ids[:-1] if ended else ids)

    async def follow(
        self,
        turn: TurnResult,
        *messages: Mapping[str, Any],
        reward: float | None = None,
        max_tokens: int | None = None,
        called: bool = False,
    ) -> Step:
        """What follows `turn`: `messages` are said, and the assistant is to answer. Called once a turn.

        Without messages the trajectory is done. The deadlines of the answer that this is part of hold for the
        template too, which is rendered beside the event loop.
        Raises ChatError where the template does not take these messages, cannot append them, or does not come to an
        end; then nothing was said. So it does where something was said after that turn.
        """
        if turn is self._followed:
            raise ChatError(f"what follows turn {turn.index} was said already: give all its messages at once")
        new = checked_messages(messages)
        said = {"role": "assistant", "content": self.text(turn)}
        if not new:
            self.messages.append(said)
            self._followed = turn
            return Step(done=True, reward=reward, called=called)
        try:
            past = [*self.messages, said]
            branch, glue, suffix = await self.form.chat.aside.run(self._owner, self._after, turn, past, new)
        except TimeoutError:
            raise ChatError(f"the chat template did not come to an end within {RENDER_S:g} s") from None
        self.messages += (said, *new)
        self._followed = turn
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
        self, turn: TurnResult, past: Sequence[Message], new: Sequence[Message]
    ) -> tuple[IntArray | None, IntArray, Suffix]:
        """Ids of the branch, if one is needed, the glue, and the rest. past: with what the turn said."""
        roles = (message["role"] for message in new)
        if (unknown := next((role for role in roles if not self.form.takes(role)), None)) is not None:
            raise ChatError(f"the chat template writes nothing of messages of role {unknown!r}")
        if self._template.on_user_turn == "keep" or all(message["role"] != "user" for message in new):
            try:
                suffix = self.form.suffix(new)
            except ChatError:
                if self._template.on_unstable == "refuse":
                    raise
            else:
                return None, suffix.after(turn.token_ids), suffix
        anew, suffix = self.form.rendered_anew(past, new)
        held = np.concatenate([turn.before, turn.token_ids])
        for same in (held, np.concatenate([held, suffix.closing])):
            if np.array_equal(anew, same) and len(suffix.glue):
                return None, suffix.after(turn.token_ids), suffix
        return anew, suffix.glue, suffix


class _Sent(Conversation):
    """Unpickled it is a `Conversation`."""

    def __init__(
        self,
        shared: SharedFormat,
        form: Form,
        submitted: Sequence[Message],
        template: Template,
        said: Sequence[Message],
        owner: Owner,
    ) -> None:
        super().__init__(form, submitted, template, said, owner)
        self._shared = shared

    def __reduce__(self) -> tuple[Any, ...]:
        form, begins = self.form, self._begins
        split = self.messages[:begins], self.messages[begins:]
        return _received, (self._shared, form.tools, form.options, *split, self._template, self._owner)


def _received(
    shared: SharedFormat,
    tools: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    submitted: Sequence[Message],
    said: Sequence[Message],
    template: Template,
    owner: Owner,
) -> Conversation:
    return Conversation(shared.get().form(tools, options), submitted, template, said, owner)

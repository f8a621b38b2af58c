"""A checkpoint's chat format: messages to ids, and what follows a sampled turn without a look at what was sampled."""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.request import IntArray
from rollout.chat.aside import Aside
from rollout.chat.errors import ChatError
from rollout.chat.follow import Followed, Render, call_id, follow, printed
from rollout.chat.marks import Marks, Vocabulary
from rollout.chat.messages import Message
from rollout.chat.template import ChatTemplate
from rollout.chat.tokenizer import Piece, Tokenizer

EMPTY: IntArray = np.zeros(0, np.int32)
FORMS = 256
"""Combinations of tools and options that are kept: a batch's groups share a few."""


@dataclass(frozen=True, slots=True)
class Suffix:
    """What follows a sampled turn, int32 each, to be appended in this order.

    closing: the end of the assistant's turn, up to and with its control token; that may have been sampled already.
    glue: the template's text from there to the first new content.
    observation: the new contents, with what the template writes between them.
    opening: the template's text after them, which opens the next turn.
    """

    closing: IntArray
    glue: IntArray
    observation: IntArray
    opening: IntArray

    def after(self, sampled: IntArray) -> IntArray:
        """The glue after a turn: with the closing, unless the turn ended itself."""
        if len(self.closing) and len(sampled) and sampled[-1] == self.closing[-1]:
            return self.glue
        return np.concatenate([self.closing, self.glue])


class ChatFormat:
    """Template and tokenizer of one checkpoint. Safe to use from several threads. aside: where the event loop has its
    work done."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.aside = Aside()
        self.vocabulary = Vocabulary(tokenizer.control, tokenizer.reserved)
        self.control = frozenset(tokenizer.control.values())
        self._forms: OrderedDict[bytes, Form] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ChatFormat], tuple[ChatTemplate, Tokenizer]]:
        return ChatFormat, (self.template, self.tokenizer)

    @classmethod
    def load(cls, checkpoint: str | Path, tokenizer: Tokenizer | None) -> ChatFormat | None:
        """None where the checkpoint has no tokenizer or no template. Raises ValueError, naming the file."""
        template = ChatTemplate.load(checkpoint)
        return None if template is None or tokenizer is None else cls(template, tokenizer)

    def form(self, tools: Sequence[Mapping[str, Any]] = (), options: Mapping[str, Any] | None = None) -> Form:
        """tools: JSON schemas. options: the template's own (`enable_thinking`)."""
        content = json.dumps([list(tools), options or {}], default=repr).encode(errors="surrogatepass")
        key = hashlib.sha256(content).digest()
        with self._lock:
            if key not in self._forms:
                self._forms[key] = Form(self, tuple(tools), dict(options or {}))
            self._forms.move_to_end(key)
            while len(self._forms) > FORMS:
                self._forms.popitem(last=False)
            return self._forms[key]


@dataclass(frozen=True, slots=True)
class _Proof:
    """tools: those that the text after a turn depends on. taken: conversations that agreed. against: why not."""

    tools: Sequence[Mapping[str, Any]] = ()
    taken: tuple[str, ...] = ()
    against: str | None = None


class Form:
    """What the conversations with the same tools and template options share."""

    def __init__(self, chat: ChatFormat, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        self.chat = chat
        self.tools = tools
        self.options = options
        self._frames: dict[tuple[str, ...], tuple[str, str]] = {}
        self._proofs: dict[tuple[str, ...], _Proof] = {}
        self._taken: dict[str, bool] = {}
        self._opens_reasoning: bool | None = None

    @property
    def control(self) -> frozenset[int]:
        """Ids of the added tokens."""
        return self.chat.control

    def decode(self, ids: IntArray) -> str:
        return self.chat.tokenizer.decode(ids)

    def prove(self, roles: Sequence[str]) -> None:
        """Can messages of these roles follow any sampled turn? Raises ChatError, saying what stands against it."""
        self._follow(_examples(roles), Marks(self.chat.vocabulary))

    def takes(self, role: str) -> bool:
        """Does the template write what messages of this role say? Many pass over one that they do not know."""
        if role not in self._taken:
            (example,) = _examples((role,))
            self._taken[role] = printed(self._renderer(self.tools), example)
        return self._taken[role]

    def prompt(self, messages: Sequence[Message]) -> IntArray:
        """int32[L]: the conversation, up to where the assistant is to answer. Raises ChatError."""
        marks = Marks(self.chat.vocabulary)
        text = self._renderer(self.tools, marks)([marks.message(message) for message in messages], True)
        return self.chat.tokenizer.encode_pieces(marks.reveal(text)).ids

    def suffix(self, messages: Sequence[Message]) -> Suffix:
        """What the template puts between any sampled turn and the next, for `messages` to be said between them.

        Raises ChatError where that depends on what was sampled or said before.
        """
        marks = Marks(self.chat.vocabulary)
        followed = self._follow([marks.message(message) for message in messages], marks)
        text = followed.text
        head, tail = self._frame(messages)
        if not (text.startswith(head) and text.endswith(tail) and len(head) + len(tail) <= len(text)):
            head = tail = ""  # the template looks at what is said: all of it counts as content
        return self._split(followed.closing, head, marks.reveal(text[len(head) : len(text) - len(tail)]), tail)

    def rendered_anew(self, messages: Sequence[Message], new: Sequence[Message]) -> tuple[IntArray, Suffix]:
        """The conversation `messages` as if nothing in it had been sampled, and what follows it for `new`.

        Where the two cannot be told apart, all of it is the first part. Raises ChatError.
        """
        whole = self.prompt([*messages, *new])
        nothing = Suffix(EMPTY, EMPTY, EMPTY, EMPTY)
        try:
            suffix = self.suffix(new)
        except ChatError:
            return whole, nothing
        rest = np.concatenate([suffix.glue, suffix.observation, suffix.opening])
        start = len(whole) - len(rest)
        if start <= 0 or not np.array_equal(whole[start:], rest):
            return whole, nothing
        return whole[:start], suffix

    def opens_reasoning(self) -> bool:
        """Does the template itself begin the reasoning, so that a turn starts inside of `<think>`?"""
        if self._opens_reasoning is None:
            text = self._renderer(())([{"role": "user", "content": "question"}], True)
            self._opens_reasoning = text.rfind("<think>") > text.rfind("</think>")
        return self._opens_reasoning

    def _split(self, closing: str, head: str, contents: list[Piece], tail: str) -> Suffix:
        """A token across the border between frame and content counts as content."""
        pieces = [Piece(closing, frame=True), Piece(head, frame=True), *contents, Piece(tail, frame=True)]
        encoded = self.chat.tokenizer.encode_pieces(pieces)
        ids, (first, last) = encoded.ids, encoded.pieces()
        # A template without an end of its own (GLM's) lets the beginning of the next message end the turn.
        ends = int((last == 0).sum()) if closing else 1
        controls = (i for i, token in enumerate(ids[:ends].tolist()) if token in self.chat.control)
        closed = next(controls, -1) + 1
        start = max(closed, int((last < 2).sum()))
        stop = max(start, int((first < len(pieces) - 1).sum()))
        return Suffix(ids[:closed], ids[closed:start], ids[start:stop], ids[stop:])

    def _frame(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The template's text before the first and after the last content of messages of these roles."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._frames:
            words = [f"w{secrets.token_hex(8)}w" for _ in roles]
            named = [{**message, "content": word} for message, word in zip(_examples(roles), words, strict=True)]
            try:
                text = self._follow(named, Marks(self.chat.vocabulary)).text
            except ChatError:
                text = ""
            self._frames[roles] = text.partition(words[0])[0], text.rpartition(words[-1])[2]
        return self._frames[roles]

    def _follow(self, messages: Sequence[Message], marks: Marks) -> Followed:
        """Proved once for messages of these roles; each are then compared in two conversations."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._proofs:
            self._proofs[roles] = self._prove(_examples(roles))
        proof = self._proofs[roles]
        if proof.against is not None:
            raise ChatError(proof.against)
        return follow(self._renderer(proof.tools, marks), messages, (proof.taken[0], proof.taken[-1]))

    def _prove(self, messages: Sequence[Message]) -> _Proof:
        try:
            followed = follow(self._renderer(self.tools), messages)
        except ChatError as error:
            return _Proof(against=error.message)
        with suppress(ChatError):
            # Tools hardly ever make a difference here, and each rendering would print them.
            if self.tools and follow(self._renderer(()), messages) == followed:
                return _Proof((), followed.taken)
        return _Proof(self.tools, followed.taken)

    def _renderer(self, tools: Sequence[Mapping[str, Any]], marks: Marks | None = None) -> Render:
        """marks: hide in tools and options what is no token. Without them the text is not to be encoded."""
        options = self.options
        if marks is not None:
            tools = [marks.data(tool) for tool in tools]
            options = {name: marks.data(value) for name, value in options.items()}
        render = self.chat.template.render
        return lambda messages, opened: render(messages, tools=tools, options=options, add_generation_prompt=opened)


def _examples(roles: Sequence[str]) -> list[Message]:
    """Messages of these roles, with what some templates insist on in results."""
    results = itertools.count()
    return [
        {"role": role, "content": "text"}
        | ({"name": "tool", "tool_call_id": call_id(next(results))} if role == "tool" else {})
        for role in roles
    ]

"""Texts of people and tools, so written that no template can make a control token of them.

Every spelling of an added token in them is replaced by a word that nobody can guess; the template is rendered with
that; then the words are turned back into what they stand for, as text. A text without such a spelling goes through
unchanged, so the template sees what it would have seen (its trims, prefixes and JSON are the ordinary ones).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollout.chat.errors import ChatError
from rollout.chat.messages import Message
from rollout.chat.tokenizer import Piece, spellings


class Vocabulary:
    """Which spellings are hidden. control: of all added tokens. reserved: those that assistants may not say either."""

    def __init__(self, control: Iterable[str], reserved: Iterable[str]) -> None:
        self.control = Spellings(control)
        self.reserved = Spellings(reserved)


class Marks:
    """Of one rendering."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._secret = secrets.token_hex(8)
        self._texts: list[str] = []
        self._vocabulary = vocabulary

    def message(self, message: Message) -> Message:
        """An assistant's `<think>` or `<tool_call>` stays a token, for it is the model's own language."""
        of = self._vocabulary.reserved if message["role"] == "assistant" else self._vocabulary.control
        return {key: value if key == "role" else self._hide(value, of) for key, value in message.items()}

    def data(self, value: Any) -> Any:
        """Of a tool's schema, or of an option."""
        return self._hide(value, self._vocabulary.control)

    def reveal(self, rendered: str) -> list[Piece]:
        """The rendered text in pieces; what was hidden is text. Raises ChatError where a mark was rewritten."""
        parts = re.split(rf"(q{self._secret}x\d+q)", rendered) if self._texts else [rendered]
        pieces = []
        for i, part in enumerate(parts):
            if i % 2:
                pieces.append(Piece(self._texts[int(part[len(self._secret) + 2 : -1])]))
            elif self._secret in part.lower():
                raise ChatError("the chat template rewrites the letters of a message that spells control tokens")
            elif part:
                pieces.append(Piece(part, frame=True))
        return pieces

    def _hide(self, value: Any, of: Spellings) -> Any:
        if isinstance(value, str):
            return of.replace(value, self._mark)
        if isinstance(value, Mapping):
            return {self._hide(key, of): self._hide(item, of) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(item, of) for item in value]
        return value

    def _mark(self, text: str) -> str:
        self._texts.append(text)
        return f"q{self._secret}x{len(self._texts) - 1}q"


class Spellings:
    """Finds added tokens in a text, and what could become one together with the frame beside it.

    That is a beginning of one at the text's end, or an end of one at its beginning.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        found = tuple(tokens)
        self._whole = spellings(found)
        self._longest = max(map(len, found), default=0)
        self._beginnings = {token[:n] for token in found for n in range(1, len(token)) if token[:n].strip()}
        self._ends = {token[-n:] for token in found for n in range(1, len(token)) if token[-n:].strip()}

    def replace(self, text: str, mark: Callable[[str], str]) -> str:
        spans = [match.span() for match in self._whole.finditer(text)]
        start = next((n for n in self._sizes(spans[0][0] if spans else len(text)) if text[:n] in self._ends), 0)
        floor = spans[-1][1] if spans else start
        end = next((len(text) - n for n in self._sizes(len(text) - floor) if text[-n:] in self._beginnings), len(text))
        if start:
            spans.insert(0, (0, start))
        if end < len(text):
            spans.append((end, len(text)))
        done, at = [], 0
        for first, last in spans:
            done += [text[at:first], mark(text[first:last])]
            at = last
        return "".join((*done, text[at:]))

    def _sizes(self, limit: int) -> range:
        """Longest first."""
        return range(min(self._longest - 1, limit), 0, -1)

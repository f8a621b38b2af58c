"""Messages to ids, so that sampled ids are never encoded again.

The chat template renders a conversation of placeholders; the text around the placeholders is the frame. The frame is
encoded with its control tokens, what people wrote as plain text: `<|im_end|>` in a message stays six letters and
some punctuation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class NextTurn:
    """What goes between a sampled turn and the next. glue: up to the user's text; observation: from there on."""

    glue: list[int]
    observation: list[int]


class ChatFormat:
    """Over a tokenizer of the transformers library that has a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a new conversation, ending where the assistant has to answer."""
        frame = self._frame([message["role"] for message in messages])
        ids = self._encode_frame(frame[0])
        for message, after in zip(messages, frame[1:], strict=True):
            ids += self._encode_text(message["content"]) + self._encode_frame(after)
        return ids

    def next_turn(self, answer: Sequence[int], text: str) -> NextTurn:
        """What to append to a conversation that ends with the sampled ids `answer`, for the user to say `text`.

        Only the template's end of a conversation is used: it never sees `answer`.
        """
        *_, between, after = self._frame(["user", "assistant", "user"])
        glue = self._encode_frame(between)
        if len(answer) and answer[-1] == glue[0]:
            # The model ended its turn itself. A turn that was cut by its budget has no such token.
            glue = glue[1:]
        return NextTurn(glue=glue, observation=self._encode_text(text) + self._encode_frame(after))

    def _frame(self, roles: Sequence[str]) -> list[str]:
        """len(roles) + 1 pieces: what the template writes before, between and after the messages' contents."""
        marks = [f"[[content {i}]]" for i in range(len(roles))]
        rest = self._tokenizer.apply_chat_template(
            [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)],
            tokenize=False,
            add_generation_prompt=True,
        )
        pieces = []
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise ValueError("the chat template rewrites or drops the content of a message")
            pieces.append(piece)
        return [*pieces, rest]

    def _encode_frame(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

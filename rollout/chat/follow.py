"""The text that a chat template puts between what an assistant said and what follows, and the proof that it is one.

A word that nobody can guess stands for what the assistant said; the text after it is the difference between the
conversation with the new messages and without. It is taken for several conversations that differ in everything before
(what was said, whether with reasoning or calls, system messages and earlier turns): where all agree, it depends on the
new messages alone, and may be appended to whatever was sampled.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rollout.chat.errors import ChatError
from rollout.chat.messages import Message

Render = Callable[[Sequence[Message], bool], str]
"""Text of a conversation; the flag says whether the assistant's next turn is opened at its end."""


@dataclass(frozen=True, slots=True)
class Followed:
    """closing: the end of an assistant's turn. text: what comes after it. taken: the conversations that say so."""

    closing: str
    text: str
    taken: tuple[str, ...]


def follow(render: Render, messages: Sequence[Message], only: Sequence[str] = ()) -> Followed:
    """What comes after an assistant's turn for `messages` to be said and the next turn to be opened.

    only: look at these conversations, not at all. Raises ChatError where they do not agree, or where the template
    takes none of them.
    """
    word = "w" + secrets.token_hex(8)
    found: dict[str, str] = {}
    refused: ChatError | None = None
    for name, before in _conversations(word, sum(message["role"] == "tool" for message in messages)):
        if only and name not in only:
            continue
        try:
            closed = _after(word, render(before, False))
            opened = _after(word, render([*before, *messages], True))
        except ChatError as error:
            # Many templates insist on calls before results, or know no system role: that conversation does not occur.
            refused = error
            continue
        if not opened.startswith(closed):
            raise ChatError(f"the chat template ends the assistant's turn otherwise when more follows ({name})")
        found[name] = opened[len(closed) :]
    if not found:
        raise refused or ChatError("no conversation to append to")
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            raise ChatError(f"what the chat template writes after a turn depends on the turn: {first} against {name}")
    plain = [{"role": "user", "content": "question"}, {"role": "assistant", "content": word}]
    return Followed(_after(word, render(plain, False)), found[first], tuple(found))


def printed(render: Render, message: Message) -> bool:
    """Does the template write what a message says that stands where `message` does, in any conversation?"""
    word = "w" + secrets.token_hex(8)
    for _, before in _conversations("answer", 1):
        with suppress(ChatError):
            if word in render([*before, {**message, "content": word}], True):
                return True
    return False


def _conversations(word: str, results: int) -> Iterator[tuple[str, list[Message]]]:
    """Conversations that end with what an assistant said, `word` its last word. results: tool messages to follow."""
    user = {"role": "user", "content": "question"}
    call = {"role": "assistant", "content": "", "tool_calls": _calls("argument", 1)}
    result = {"role": "tool", "content": "result", "tool_call_id": call_id(0), "name": "tool"}
    said = {"role": "assistant", "content": "answer"}
    # What stands before the word is what models say, for a template may look at that, or at how long it is.
    histories: dict[str, tuple[list[Message], str]] = {
        "a first turn": ([user], word),
        "a later turn": ([user, said, {"role": "user", "content": "more"}], f"some\nwords {word}"),
        "a turn after others": (
            [{"role": "system", "content": "rules"}, user, call, result, said, user],
            f"<think>\nthought\n</think>\n\n{word}",
        ),
        "a turn after a tool's result": (
            [user, call, result],
            f'<tool_call>\n{{"name": "tool", "arguments": {{}}}}\n</tool_call> {word}',
        ),
    }
    for when, (history, text) in histories.items():
        turns: dict[str, Message] = {
            "of text": {"role": "assistant", "content": text},
            "with reasoning": {"role": "assistant", "content": text, "reasoning_content": "thought"},
            "with calls": {"role": "assistant", "content": "", "tool_calls": _calls(word, max(1, results))},
        }
        for what, turn in turns.items():
            yield f"{when} {what}", [*history, turn]


def call_id(index: int) -> str:
    """Of the calls of one turn. Nine letters and digits: some templates take nothing else."""
    return f"call{index:05d}"


def _calls(argument: str, count: int) -> list[Message]:
    return [
        {
            "type": "function",
            "id": call_id(i),
            "function": {"name": "tool", "arguments": {"argument": argument if i == count - 1 else "other"}},
        }
        for i in range(count)
    ]


def _after(word: str, rendered: str) -> str:
    _, found, after = rendered.rpartition(word)
    if not found:
        raise ChatError("the chat template rewrites or drops what the assistant said")
    return after

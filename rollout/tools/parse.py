"""Tool calls in what a model said, in the format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": ...}
</tool_call>`, with any text around them.

Reasoning is no place for calls: what stands in `<think>...</think>`, or before a `</think>` that nothing opened (the
template may have), or after a `<think>` that is never closed, is not looked at. A JSON value is read to its own end, so
that a tag inside a string of it is a part of that string.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
TAG = re.compile(f"{OPEN}|{THINK}|{THOUGHT}")
PAIR = re.compile(f"{OPEN}|{CLOSE}")
BETWEEN = re.compile(r"[\s,;]*")
"""What may stand between two calls in one pair of tags."""
MOST = 128
"""Calls that are looked at in one turn: a model that repeats a tag to its limit must not stop the worker."""
SHOWN = 200
"""Characters of a bad call that its error repeats."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadCall:
    """What should have been a call. problem: for the model to read."""

    problem: str


@dataclass(frozen=True, slots=True)
class Said:
    """A turn, read. content: what is neither reasoning nor a call, stripped of white space around it."""

    content: str
    reasoning: str
    calls: tuple[Call | BadCall, ...]


def read(text: str, *, complete: bool = True, thinking: bool = False) -> Said:
    """complete: the model ended the turn itself; else a call at its end may lack its rest, and is none.

    thinking: the turn began inside of its reasoning.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[Call | BadCall] = []
    at = looked = thought = 0
    more = False
    if thinking:
        at = _think(text, 0, reasoning)
    while (tag := TAG.search(text, at)) is not None:
        content.append(text[at : tag.start()])
        at = tag.end()
        if tag[0] == THINK:
            at = _think(text, at, reasoning)
        elif tag[0] == THOUGHT:
            # It closes what nothing here opened: everything so far was reasoning, drafts of calls included.
            reasoning, content, calls, more = [], [], [], False
            thought = tag.start()
        elif looked < MOST:
            found, at = _block(text, at, complete)
            looked += len(found)
            calls += found
        else:
            more = True
    content.append(text[at:])
    if more or len(calls) > MOST:
        calls[MOST:] = [BadCall(f"no more than {MOST} calls are looked at in one turn")]
    return Said("".join(content).strip(), "\n".join((text[:thought], *reasoning)).strip(), tuple(calls))


def _think(text: str, at: int, reasoning: list[str]) -> int:
    """To the end of the reasoning that begins at `at`."""
    end = text.find(THOUGHT, at)
    reasoning.append(text[at:] if end < 0 else text[at:end])
    return len(text) if end < 0 else end + len(THOUGHT)


def _block(text: str, at: int, complete: bool) -> tuple[list[Call | BadCall], int]:
    """The calls of one pair of tags, whose opening ends at `at`; and where the pair ends."""
    start, found = at, list[Call | BadCall]()
    while True:
        at = BETWEEN.match(text, at).end()  # type: ignore[union-attr]
        if found and text.startswith(CLOSE, at):
            return found, at + len(CLOSE)
        if found and text.startswith(OPEN, at):
            return found, at  # the closing tag was forgotten
        if found and CLOSE.startswith(text[at:]):
            # Without its closing tag, as a model may well end its turn; not where the turn was cut.
            return (found, len(text)) if complete else ([*found[:-1], _cut(text[start:])], len(text))
        try:
            value, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return _broken(text, start, at, found, complete, error)
        for item in value if isinstance(value, list) else [value]:
            found.append(_call(item))
        if len(found) > MOST:
            end = text.find(CLOSE, at)
            return found, len(text) if end < 0 else end + len(CLOSE)


def _broken(
    text: str, start: int, at: int, found: list[Call | BadCall], complete: bool, error: Exception
) -> tuple[list[Call | BadCall], int]:
    """One error for a pair of tags, or what there is of it. at: where the value begins that cannot be read.

    It goes to the next tag that is in no string, or to one in a string behind which a call can be read: then a
    quotation mark was forgotten, and what is behind counts.
    """
    reached, unended = _reached(text, at, error)
    if not complete and (unended or len(text) - reached < len("\\u0000")):
        return [*found, _cut(text[start:])], len(text)
    body, end = text[start:], len(text)
    for tag in PAIR.finditer(text, start):
        quoted = tag.start() < reached or (unended and tag[0] == OPEN)
        if not quoted or (tag[0] == OPEN and _is_call(text, tag.end())):
            body, end = text[start : tag.start()], tag.start() if tag[0] == OPEN else tag.end()
            break
    else:
        if not complete:
            return [*found, _cut(body)], end
    if found:
        return [*found, BadCall(f"text follows the call: {_shown(body)}")], end
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error) or type(error).__name__
    return [BadCall(f"the call is not valid JSON ({reason}); {_instead(body)}")], end


def _reached(text: str, at: int, error: Exception) -> tuple[int, bool]:
    """How far it is JSON; and whether a string begins there that has no end."""
    if not isinstance(error, json.JSONDecodeError):  # a number that is none, or too deep: what it is does not say where
        try:
            return _LENIENT.raw_decode(text, at)[1], False
        except RecursionError:
            return at, False
        except json.JSONDecodeError as other:
            error = other
    return error.pos, error.msg.startswith("Unterminated string")


def _is_call(text: str, at: int) -> bool:
    with suppress(ValueError, RecursionError):
        value, _ = _DECODER.raw_decode(text, BETWEEN.match(text, at).end())  # type: ignore[union-attr]
        first = value[0] if isinstance(value, list) and value else value
        return isinstance(first, dict) and "name" in first
    return False


def _call(value: Any) -> Call | BadCall:
    said = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return BadCall(f"a call is a JSON object; {_instead(said)}")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        return BadCall(f'the call has no "name"; {_instead(said)}')
    if "arguments" not in value and len(value) > 1:
        # Of what stands there under another name the tool would learn nothing.
        other = next(key for key in value if key != "name")
        return BadCall(f'the call has no "arguments" but {_shown(json.dumps(other))}; {_instead(said)}')
    if isinstance(arguments, str):
        # Encoded twice, as it stands in the API that models imitate.
        with suppress(ValueError, RecursionError):
            arguments = _DECODER.decode(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return BadCall(f'"arguments" of {name} must be a JSON object, not {_shown(json.dumps(arguments))}')
    # It goes back to the model in messages, where a lone surrogate, which JSON may spell, is no text.
    return Call(name.encode(errors="replace").decode(), arguments)


def _instead(body: str) -> str:
    return f'write {{"name": ..., "arguments": {{...}}}} instead of: {_shown(body)}'


def _cut(body: str) -> BadCall:
    return BadCall(f"the turn was cut inside of a call, which was not run: {_shown(body)}")


def _shown(text: str) -> str:
    text = text.strip()
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)
"""Line breaks inside of strings are taken: models write them."""
_LENIENT = json.JSONDecoder(strict=False, parse_int=str)
"""Also of numbers that are none, and as long as one likes."""

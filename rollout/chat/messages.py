"""Messages and tool schemas as they came, checked and brought into the one form that every template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rollout.chat.errors import ChatError

Message = dict[str, Any]
"""role: str, content: str, and whatever else the template reads (`reasoning_content`, `tool_calls`, `name`)."""

ROLE = re.compile(r"[A-Za-z_]{1,32}")
"""A role is written into the frame, so it cannot be any text."""


def checked_messages(messages: Iterable[Mapping[str, Any]], field: str = "messages") -> tuple[Message, ...]:
    """Raises ChatError with the path of the first one that is wrong."""
    return tuple(_message(message, f"{field}[{i}]") for i, message in enumerate(messages))


def checked_prompt(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages that a model is to answer."""
    checked = checked_messages(messages)
    if not checked:
        raise ChatError("must not be empty")
    if checked[-1]["role"] == "assistant":
        raise ChatError(
            "the last one is the assistant's own: there is nothing to answer", f"messages[{len(checked) - 1}]"
        )
    return checked


def checked_tools(tools: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """JSON schemas of functions: `{"type": "function", "function": {"name": ..., "parameters": ...}}`.

    The inner map alone is taken too. Raises ChatError.
    """
    checked = []
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ChatError("must be the JSON schema of a function that has a name", f"tools[{i}]")
        checked.append({"type": "function", "function": dict(function)})
    return tuple(checked)


def all_as_json(messages: Iterable[Message]) -> tuple[bytes, ...] | None:
    """Each by itself, in UTF-8. None where that does not hold one of them as it is."""
    texts = []
    for message in messages:
        try:
            text = json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
            if json.loads(text) != message:
                return None
        except (TypeError, ValueError, RecursionError):
            return None
        texts.append(text)
    return tuple(texts)


def from_json(text: bytes) -> tuple[Message, ...]:
    """Of a list of what `all_as_json` returns. Raises ChatError."""
    try:
        messages = json.loads(text)
        text.decode()
    except (ValueError, RecursionError) as error:
        raise ChatError(f"is not JSON in UTF-8: {error}") from None
    if not isinstance(messages, list):
        raise ChatError("must be a list")
    checked = checked_messages(messages)
    if all_as_json(checked) is None:
        raise ChatError("holds what JSON in UTF-8 does not")
    return checked


def _message(message: Any, field: str) -> Message:
    if not isinstance(message, Mapping):
        raise ChatError("must be a map", field)
    role = message.get("role")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise ChatError("must be a name of letters", f"{field}.role")
    if role in ("system", "user") and "content" not in message:
        raise ChatError("is missing: what the message says", f"{field}.content")
    return {**message, "role": role, "content": _text(message.get("content"), f"{field}.content")}


def _text(content: Any, field: str) -> str:
    """None, which clients send beside tool calls, is no text; the parts of a list are joined.

    Some templates print a list or None as nothing at all or as "None", others fail.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatError(f"must be a string, null or a list of text parts, not a {type(content).__name__}", field)
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError('must be {"type": "text", "text": ...}: this worker serves text only', f"{field}[{i}]")
        texts.append(part["text"])
    return "".join(texts)

"""What a tool returned, as the text that the model reads.

- A string is itself; the empty one is `""`, so that the model sees that there is nothing.
- bytes are read as UTF-8, bad ones replaced.
- Of an iterator, as a generator function returns, so many items are taken as the limit has characters.
- Anything else is JSON: None is `null`, `{'celsius': 9}` is `{"celsius": 9}`; dataclasses, pydantic models, sets, dates
  and the like as pydantic writes them, arrays and tensors as lists of numbers; what is left is its `str()`, and where
  its class defines none, or that fails, the name of the class. Where all of it is one string, it is itself: a table
  keeps its lines.
- What is longer than the limit is cut, and a line says so.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic_core import to_jsonable_python

LIMIT = 16_384
"""Characters."""


def as_text(value: Any, limit: int = LIMIT) -> str:
    """Never raises."""
    try:
        text = _text(value, limit)
    except BaseException:  # objects may raise what they like where they are looked at, and this may be on the loop
        text = _described(value)
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut: the first {limit} of {len(text)} characters]"
    # A lone surrogate is no text: no tokenizer takes it.
    return text.encode(errors="replace").decode()


def _text(value: Any, limit: int) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value).decode(errors="replace")
    if isinstance(value, str):
        return str.__str__(value) or '""'
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, limit))
    plain = to_jsonable_python(value, fallback=_plain, bytes_mode="utf8", inf_nan_mode="constants")
    return plain or '""' if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else _described(value)


def _described(value: Any) -> str:
    kind: Any = type(value)
    if kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__:  # Python's own words are an address
        with suppress(BaseException):
            return str.__str__(str(value))
    return f"<{kind.__name__}>"

"""What a tool returned, as the text that the model reads.

- A string is itself; the empty one is `""`, so that the model sees that there is nothing.
- bytes are read as UTF-8, bad ones replaced.
- Anything else is JSON: None is `null`, `{'celsius': 9}` is `{"celsius": 9}`; dataclasses, pydantic models, sets, dates
  and the like as pydantic writes them, numpy's values as the plain ones; what is left is its `str()`, and where its
  class defines none, or that fails, the name of the class.
- What is longer than the limit is cut, and a line says so.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from pydantic_core import to_jsonable_python

LIMIT = 16_384
"""Characters."""


def as_text(value: Any, limit: int = LIMIT) -> str:
    """Never raises."""
    text = _text(value)
    if len(text) > limit:
        text = f"{text[:limit]}\n[cut: the first {limit} of {len(text)} characters]"
    # A lone surrogate is no text: no tokenizer takes it.
    return text.encode(errors="replace").decode()


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        value = bytes(value).decode(errors="replace")
    if isinstance(value, str) and value:
        return value
    try:
        plain = to_jsonable_python(value, fallback=_describe, bytes_mode="utf8", inf_nan_mode="constants")
        return json.dumps(plain, ensure_ascii=False)
    except Exception:  # a cycle, bytes inside that are no text, an object that fails where it is looked at
        return str(_describe(value))


def _describe(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    kind: Any = type(value)
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        return f"<{kind.__name__}>"  # Python's own words would be an address
    try:
        return str(value)
    except Exception:
        return f"<{kind.__name__}>"

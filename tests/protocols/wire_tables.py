"""The tables of docs/wire.md, made from the models.

    python -m tests.protocols.wire_tables

rewrites what stands between `<!-- NAME -->` and `<!-- end -->` there. A class's docstring gives the text, its lines
`field: meaning` the column of meanings.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import StringConstraints
from pydantic.fields import FieldInfo

from protocols import ERRORS, STATUS_OF, Limits, ModelInfo, Record, Value
from protocols.base import ArraySpec
from protocols.codec import REPLIES, REQUESTS
from protocols.opaque import OpaqueSpec
from protocols.records import Failure, Partial, Segment, Times, Truncation, Turn
from protocols.replies import EVENTS
from protocols.work import Budget, Environment, Group, Sampling, ScriptedTurn, Template

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"
PARTS = (
    Group, Template, Sampling, Environment, ScriptedTurn, Budget, Record, Segment, Turn, Times, Truncation, Partial,
    Failure, Limits, ModelInfo,
)  # fmt: skip


def models(chosen: dict[str, type[Value]]) -> str:
    return "\n\n".join(section(f"`{name}`", model) for name, model in chosen.items())


def section(title: str, model: type[Value]) -> str:
    text, meanings = explain(model)
    # Every message has these, and they are described once.
    fields = {name: info for name, info in model.model_fields.items() if name not in {"protocol", "type"}}
    if "type" in model.model_fields and "id" not in meanings:
        del fields["id"]
    if not fields:
        return f"### {title}\n\n{text} No further fields."
    rows = [
        f"| `{name}` | {kind(info.annotation, tuple(info.metadata))} | {default(info)} | {meanings.get(name, '')} |"
        for name, info in fields.items()
    ]
    return "\n".join([f"### {title}\n", text, "", "| field | type | default | meaning |", "|---|---|---|---|", *rows])


def explain(model: type[Value]) -> tuple[str, dict[str, str]]:
    """A docstring as text and meanings by field."""
    text: list[str] = []
    meanings: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(model) or "").split("\n"):
        found = re.match(r"(\w+): (.*)", line)
        if found and found[1] in model.model_fields:
            name = found[1]
            meanings[name] = found[2]
        elif name and line.startswith(" "):
            meanings[name] += " " + line.strip()
        else:
            name = ""
            text.append(line)
    return re.sub(r"(?<!\n)\n(?!\n)", " ", "\n".join(text).strip()), meanings


def default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if isinstance(value, Value):
        return "its defaults"
    if value is None:
        return "nil"
    if isinstance(value, np.ndarray):
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`"
    if isinstance(value, tuple):
        return f"[{', '.join(f'`{item}`' for item in value)}]"
    return str(value) if value != {} else "{}"


def kind(annotation: Any, marks: tuple[Any, ...] = ()) -> str:
    """A type in words of msgpack: what stands in the header."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(arguments[0], (*arguments[1:], *marks))
    limits: dict[str, Any] = {}
    for mark in marks:
        if isinstance(mark, ArraySpec):
            return f"{mark.dtype.name} array" + (f", {mark.ndim}-D" if mark.ndim > 1 else "")
        if isinstance(mark, OpaqueSpec):
            return "opaque map"
        read_limits(mark, limits)
    if origin in (Union, types.UnionType):
        return " or ".join(kind(argument, marks) for argument in arguments)
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        return f"list of {kind(arguments[0])}" + span(limits.get("min_length"), limits.get("max_length"), "entries")
    if origin is dict:
        return f"map of {kind(arguments[0])} to {kind(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    if annotation is str:
        least, most = limits.get("min_length"), limits.get("max_length")
        return "name" if (least, most) == (1, 256) else "str" + span(least, most, "characters")
    return {int: "int", float: "float", bool: "bool", types.NoneType: "nil"}[annotation] + interval(limits)


def read_limits(mark: Any, limits: dict[str, Any]) -> None:
    for inner in mark.metadata if isinstance(mark, FieldInfo) else ():
        read_limits(inner, limits)
    for constraint in (Ge, Gt, Le, Lt, MinLen, MaxLen):
        if isinstance(mark, constraint):
            limits |= vars_of(mark)
    if isinstance(mark, StringConstraints):
        limits |= {"min_length": mark.min_length, "max_length": mark.max_length}


def vars_of(mark: Any) -> dict[str, Any]:
    return {name: getattr(mark, name) for name in mark.__slots__}


def span(least: int | None, most: int | None, unit: str) -> str:
    if least and most:
        return f", {least} to {most} {unit}"
    if most:
        return f", at most {most} {unit}"
    return ", not empty" if least else ""


def interval(limits: dict[str, Any]) -> str:
    """Bounds of a number, the whole ranges of 31, 32, 63 and 64 bits by their powers."""
    words = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    parts = [f"{words[name]} {power(limits[name])}" for name in words if name in limits]
    return f", {' and '.join(parts)}" if parts else ""


def power(value: float) -> str:
    for bits in (31, 32, 63, 64):
        if abs(value) == 2**bits:
            return f"{'-' if value < 0 else ''}2^{bits}"
    return f"{value:g}"


def statuses() -> str:
    rows = []
    for status in dict.fromkeys(STATUS_OF.values()):
        reasons = ", ".join(f"`{reason}`" for reason, of in STATUS_OF.items() if of == status)
        rows.append(f"| `{status}` | {reasons} |")
    return "\n".join(["| status | finish_reason |", "|---|---|", *rows])


def errors() -> str:
    rows = []
    for code, error in ERRORS.items():
        if code != "connection_lost":
            meaning = (inspect.getdoc(error) or "").split("\n\n")[0]
            rows.append(f"| `{code}` | {'yes' if error.retryable else 'no'} | {meaning} |")
    return "\n".join(["| code | retryable | what it means, and what to do |", "|---|---|---|", *rows])


def replies() -> str:
    return models({name: model for name, model in REPLIES.items() if model not in EVENTS})


def events() -> str:
    return models({name: model for name, model in REPLIES.items() if model in EVENTS})


def parts() -> str:
    return "\n\n".join(section(model.__name__, model) for model in PARTS)


TABLES: dict[str, Callable[[], str]] = {
    "statuses": statuses,
    "errors": errors,
    "requests": lambda: models(REQUESTS),
    "replies": replies,
    "events": events,
    "parts": parts,
}


def rewritten(document: str) -> str:
    """The document with every table as the models have it now. Raises ValueError where one has no place."""
    for name, table in TABLES.items():
        start, end = f"<!-- {name} -->\n", "\n<!-- end -->"
        if document.count(start) != 1:
            raise ValueError(f"{DOCUMENT.name} has {document.count(start)} places for {name}")
        before, rest = document.split(start)
        document = before + start + table() + rest[rest.index(end) :]
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text()))

"""Values that are made without a check, of a model that has no aliases, no extra fields and nothing private."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from pydantic import BaseModel

V = TypeVar("V", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Fields:
    """Of one model. defaults: of all fields, in order, where those can be shared; factories: what makes the others."""

    names: set[str]
    required: frozenset[str]
    defaults: dict[str, Any]
    factories: tuple[tuple[str, Callable[[], Any]], ...]


@cache
def fields_of(kind: type[BaseModel]) -> Fields:
    fields = kind.__pydantic_fields__.items()
    return Fields(
        names=set(kind.__pydantic_fields__),
        required=frozenset(name for name, field in fields if field.is_required()),
        defaults={name: field.default for name, field in fields},
        factories=tuple((name, cast(Any, field.default_factory)) for name, field in fields if field.default_factory),
    )


# The slots of a model themselves: `object.__setattr__` looks for each along the classes first.
_set_fields, _set_names, _set_extra, _set_private = (
    vars(BaseModel)[slot].__set__
    for slot in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


def made_of(kind: type[V], fields: dict[str, Any]) -> V:
    """fields: all of them, in order."""
    made = object.__new__(kind)
    _set_fields(made, fields)
    _set_names(made, fields_of(kind).names)
    _set_extra(made, None)
    _set_private(made, None)
    return made

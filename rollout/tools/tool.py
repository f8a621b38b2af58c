"""A function as a tool: its JSON schema for the model, and its arguments checked before it runs."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

MAX_NAMED = 3
"""Arguments that one refusal names."""


class BadArguments(Exception):
    """The arguments do not fit the tool; the message is for the model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """name, description, parameters (a JSON schema): what the model is told. function: called with its arguments.

    With a schema of one's own the function may take any (`**arguments`).
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Of a function (`def` or `async def`), by its type hints and docstring.

        Raises ValueError, naming the function, where it takes what JSON cannot hold, or not by name.
        """
        check_function(function)
        if any_name := _any(function):
            raise _not_by_name(function, any_name)
        doc = _doc(function)
        try:
            parameters = _model(function).model_json_schema(schema_generator=_Untitled)
        except PydanticUserError as error:
            raise _unusable(function, error) from error
        # Forbidden anyway, and so not worth the model's attention.
        shown = {key: value for key, value in parameters.items() if key not in ("title", "additionalProperties")}
        text = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
        return cls(_name(function), text, shown, function)

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates print it."""
        told = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": told}


def check_function(function: Callable[..., Any]) -> None:
    """Raises ValueError, naming it, where it cannot be called with named arguments."""
    if not callable(function):
        raise ValueError(f"{str(function)[:64]!r} is no function")
    if inspect.isasyncgenfunction(function):
        raise ValueError(f"{_name(function)}: an async generator has no result: return a list of what it yields")
    try:
        _model(function)
    except (PydanticUserError, NameError, TypeError) as error:
        raise _unusable(function, error) from error


def check(function: Callable[..., Any], arguments: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """Keyword arguments of the function's own types: what pydantic makes of the JSON. Raises BadArguments.

    required: names that must be there though the function can do without.
    """
    model = _model(function)
    try:
        made = model.model_validate(dict(arguments))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        known = ", ".join(str(info.alias) for info in model.model_fields.values()) or "none"
        named = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {_wrong(e, known)}" for e in found[:MAX_NAMED]]
        more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise BadArguments("; ".join(named) + more) from None
    if missing := [name for name in required if name not in arguments]:
        raise BadArguments("; ".join(f"{name}: Field required" for name in missing[:MAX_NAMED]))
    given = made.model_fields_set
    values = {str(info.alias): getattr(made, key) for key, info in model.model_fields.items() if key in given}
    return {**(made.model_extra or {}), **values}


@functools.lru_cache(maxsize=1024)
def _model(function: Callable[..., Any]) -> type[BaseModel]:
    """The parameters as a model. Its own field names are made up: a parameter may be called `schema` or `_x`."""
    described = {entry.arg_name: entry.description for entry in _doc(function).params}
    hints = typing.get_type_hints(_written(function), include_extras=True)
    bound = function.keywords if isinstance(function, functools.partial) else {}
    fields: dict[str, Any] = {}
    for i, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if parameter.kind is parameter.VAR_KEYWORD or name in bound:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _not_by_name(function, name)
        default = ... if parameter.default is parameter.empty else parameter.default
        info = Field(default, alias=name, description=described.get(name))
        fields[f"parameter_{i}"] = (hints.get(name, Any), info)
    others = ConfigDict(extra="allow" if _any(function) else "forbid")
    made: type[BaseModel] = create_model("Arguments", __config__=others, **fields)
    return made


def _any(function: Callable[..., Any]) -> str | None:
    """The name under which it takes arguments of any name."""
    parameters = inspect.signature(function).parameters.values()
    return next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), None)


def _written(function: Any) -> Any:
    """What has the hints and the docstring: of a partial its function, of an object that can be called its method."""
    if isinstance(function, functools.partial):
        return _written(function.func)
    return function if hasattr(function, "__name__") else type(function).__call__


def _doc(function: Callable[..., Any]) -> docstring_parser.Docstring:
    # It is cleaned twice, which a first line that is a heading would not survive.
    return docstring_parser.parse("\n" + (inspect.getdoc(_written(function)) or ""))


def _wrong(error: Any, known: str) -> str:
    unknown = error["type"] == "extra_forbidden" and len(error["loc"]) == 1
    return f"there is no such argument; known: {known}" if unknown else str(error["msg"])


def _unusable(function: Callable[..., Any], error: Exception) -> ValueError:
    return ValueError(f"{_name(function)}: {str(error).partition(chr(10))[0]}")


def _not_by_name(function: Callable[..., Any], parameter: str) -> ValueError:
    return ValueError(f"{_name(function)}: {parameter!r} must be a parameter that can be given by its name")


class _Untitled(GenerateJsonSchema):
    """Without a title for each field, which says its name again."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))

"""What every message is made of: the strict base model, arrays, and the context of a received one.

A message is checked by the same model at both ends. Built in Python it may use lists and numbers of numpy or
torch, which are turned into tuples and plain numbers here; received from the wire nothing is coerced, arrays are still
references to blobs, and the receiver's limits apply. `Received`, passed as pydantic context, tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from reprlib import Repr
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self, TypeVar, cast

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from protocols.unchecked import fields_of, made_of

if TYPE_CHECKING:
    from protocols.limits import Limits


@dataclass(frozen=True, slots=True)
class BlobRef:
    """What stands in a received header for an array: which blob, and how its bytes are to be read."""

    index: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bad:
    """What stands in a received header for what has no meaning, such as a map with a key twice."""

    why: str


@dataclass(frozen=True, slots=True)
class Received:
    """A message being decoded: its blobs, which of them a field has taken, and the limits it must keep."""

    blobs: Sequence[memoryview]
    limits: Limits
    taken: bytearray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "taken", bytearray(len(self.blobs)))

    def take(self, ref: BlobRef, dtype: np.dtype[Any], ndim: int) -> np.ndarray:
        """The blob as a read-only view of its frame. Sizes are compared as Python ints before anything is built."""
        if ref.dtype != dtype.str or len(ref.shape) != ndim:
            refuse(f"must be {dtype.str} with {ndim} dimension(s), not {ref.dtype[:16]!r} with {len(ref.shape)}")
        if not 0 <= ref.index < len(self.blobs):
            refuse(f"blob {ref.index} of {len(self.blobs)} does not exist")
        if self.taken[ref.index]:
            refuse(f"blob {ref.index} is named twice")
        size = dtype.itemsize
        for extent in ref.shape:
            if extent < 0:
                refuse(f"shape {list(ref.shape)} has a negative extent")
            size *= extent
        blob = self.blobs[ref.index]
        if size != blob.nbytes:
            refuse(f"shape {list(ref.shape)} of {dtype.str} needs {size} bytes, blob {ref.index} has {blob.nbytes}")
        self.taken[ref.index] = 1
        return np.ndarray(ref.shape, dtype, blob)


def suggestion(name: str, known: Iterable[str]) -> str:
    """What ends the refusal of a name that is not known: `; did you mean ...?`, or nothing where none is like it."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def refuse(message: str, at: str = "") -> NoReturn:
    """Fail validation of the present field; `at` is the path below it."""
    raise PydanticCustomError("refused", "{why}", {"why": message, "at": at})


class ArraySpec:
    """Pydantic annotation: a numpy array of one dtype (little-endian on the wire) and number of dimensions."""

    def __init__(self, dtype: str, ndim: int = 1) -> None:
        self.dtype = np.dtype(dtype)
        self.ndim = ndim

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._check,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda array: array),
        )

    def _check(self, value: Any, info: ValidationInfo) -> np.ndarray:
        if isinstance(value, BlobRef) and isinstance(info.context, Received):
            return info.context.take(value, self.dtype, self.ndim)
        if not isinstance(value, np.ndarray) or info.context is not None:
            refuse(f"must be a {self.dtype.str} array, not {type(value).__name__}")
        if value.dtype != self.dtype or value.ndim != self.ndim:
            refuse(
                f"must be {self.dtype.str} with {self.ndim} dimension(s), not {value.dtype.str} with {value.ndim}",
            )
        return np.ascontiguousarray(value)


class _FailFast:
    """As pydantic's own annotation, which has no hash and so cannot stand in `... | None`."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        return cast(CoreSchema, {**schema, "fail_fast": True})


T = TypeVar("T")
Many = Annotated[tuple[T, ...], _FailFast()]
"""A list on the wire. One error is enough: a long list of bad entries must not cost an error object each."""


def readable(length: int) -> BeforeValidator:
    """Text for people that must never fail to be sent: cut at `length` characters, lone surrogates replaced."""

    def mend(value: Any, info: ValidationInfo) -> Any:
        if info.context is not None or not isinstance(value, str):
            return value
        text = value if len(value) <= length else value[: length - 3] + "..."
        return text.encode(errors="replace").decode()

    return BeforeValidator(mend)


def limited(name: str) -> BeforeValidator:
    """A list of at most `limits.<name>` entries when received, counted before any entry is looked at."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if isinstance(info.context, Received) and isinstance(value, tuple):
            limit = getattr(info.context.limits, name)
            if len(value) > limit:
                refuse(f"has {len(value)} entries, more than {name}, {limit}")
        return value

    return BeforeValidator(check)


_PLAIN = {int, float, bool, str, bytes, type(None)}
"""Most fields of most values: they need no look."""


class Value(BaseModel):
    """Base of everything on the wire: immutable, strict, and an unknown field is refused by name.

    Two values are equal when they have one type and equal fields, arrays by dtype, shape and content (NaN equals
    NaN). Values that hold arrays are not hashable.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        # Validators are built when first used, which halves what importing the messages takes. Threads may do so at
        # once only since pydantic 2.14, which locks it.
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _from_either_side(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.__pydantic_fields__
        if not data.keys() <= known.keys():
            name = str(next(name for name in data if name not in known))[:64]
            refuse(f"unknown field{suggestion(name, known)}", f".{name}")
        if info.context is not None:
            return data
        return {name: value if type(value) in _PLAIN else _local(value) for name, value in data.items()}

    @classmethod
    def model_construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Self:
        """As pydantic's, for our own values that need no check: it asks every field for what none here has (an alias).

        All fields count as set. Raises TypeError for one that is missing or unknown.
        """
        known = fields_of(cls)
        if not known.required <= values.keys() <= known.names:
            wrong = (known.required - values.keys()) | (values.keys() - known.names)
            raise TypeError(f"{cls.__name__}: {', '.join(sorted(wrong))} missing or unknown")
        fields = {**known.defaults, **values}
        for name, make in known.factories:
            if name not in values:
                fields[name] = make()
        return made_of(cls, fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, likewise. update: changed fields, which nothing checks."""
        if deep:
            return super().model_copy(update=update, deep=True)
        return made_of(type(self), {**self.__dict__, **(update or {})})

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return _equal(self.__dict__, other.__dict__)

    def __repr__(self) -> str:
        """For a person: fields that are not at their default, arrays by dtype and shape, the begin of what is long."""
        fields = type(self).__pydantic_fields__.items()
        told = ((name, getattr(self, name), field.get_default(call_default_factory=True)) for name, field in fields)
        shown = (f"{name}={_BRIEF.repr(value)}" for name, value, default in told if not _equal(value, default))
        return f"{type(self).__name__}({', '.join(shown)})"

    __str__ = __repr__


class _Brief(Repr):
    def repr_ndarray(self, array: np.ndarray, level: int) -> str:  # noqa: ARG002
        return f"{array.dtype}{list(array.shape)}"

    def repr_instance(self, value: Any, level: int) -> str:
        return repr(value) if isinstance(value, Value) else super().repr_instance(value, level)


_BRIEF = _Brief()
_BRIEF.maxtuple = _BRIEF.maxlist = 3
_BRIEF.maxstring = _BRIEF.maxother = 240


def plain(value: Any) -> Any:
    """What a number may be, everywhere: Python's own, numpy's, or an array or tensor without dimensions that holds one.
    The latter come back as Python's; what is something else comes back as it is, for its field to refuse."""
    item = getattr(value, "item", None)
    return item() if item is not None and getattr(value, "shape", None) == () else value


def _local(value: Any, depth: int = 3) -> Any:
    """Numbers as Python's own and lists as tuples, so that strict fields take what Python code holds.

    No field nests deeper than a map of lists; opaque maps look after themselves.
    """
    if isinstance(value, Value):
        return value
    value = plain(value)
    if depth and isinstance(value, list | tuple):
        return tuple(_local(item, depth - 1) for item in value)
    if depth and isinstance(value, dict):
        return {key: _local(item, depth - 1) for key, item in value.items()}
    return value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if type(a) is not type(b):
            return False
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(item, b[key]) for key, item in a.items())
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) or (isinstance(a, float) and isinstance(b, float) and a != a and b != b)

"""What a caller hands over, to what messages hold; what is something else is refused by the name of its argument.

What a number may be says `protocols.base.plain`. 2.0, True and "2" are no integers; "2" and True are no numbers, but a
score may be True.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from sys import float_info
from types import UnionType
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from protocols.base import plain
from protocols.codec import bad_request
from protocols.errors import BadRequest
from protocols.fields import Value

Ids = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Token ids: a list, a numpy array, or anything that numpy reads as one-dimensional integers."""

V = TypeVar("V", bound=Value)
D = TypeVar("D", np.int32, np.uint8)


def checked(model: type[V], **fields: Any) -> V:
    """Build a protocol value; what the model refuses is a BadRequest with the field's name."""
    try:
        return model(**fields)
    except ValidationError as error:
        raise bad_request(error) from None


def int32(ids: Any, field: str) -> npt.NDArray[np.int32]:
    """int32[L] of token ids, copied. Raises BadRequest naming `field`."""
    if isinstance(ids, str):
        raise BadRequest(
            "must be token ids, not text: encode it by the model's tokenizer, or give messages", field=field
        )
    return _integers(ids, np.int32, "iu", field)


def uint8(values: Any, field: str) -> npt.NDArray[np.uint8]:
    """uint8[L] of small integers or of a mask, copied. Raises BadRequest naming `field`."""
    return _integers(values, np.uint8, "iub", field)


def _integers(values: Any, dtype: type[D], kinds: str, field: str) -> npt.NDArray[D]:
    """From 0 to the largest of their dtype."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(f"must be integers: {error}", field=field) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        raise BadRequest(
            f"must be one-dimensional integers, not {array.dtype} with {array.ndim} dimension(s)", field=field
        )
    largest = np.iinfo(dtype).max
    if array.size and not 0 <= int(array.min()) <= int(array.max()) <= largest:
        raise BadRequest(f"must lie in [0, {largest}], found {array.min()} .. {array.max()}", field=field)
    return array.astype(dtype)


def whole(value: Any, field: str) -> int:
    """Raises BadRequest naming `field`."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int):
        raise BadRequest(f"must be an integer, not {_shown(value)}", field=field)
    return found


def number(value: Any, field: str) -> float:
    """A score, which may be a bool too: an answer is right or not. Raises BadRequest naming `field`."""
    found = plain(value)
    if not isinstance(found, int | float) or not abs(found) <= float_info.max:
        raise BadRequest(f"must be a finite number, not {_shown(value)}", field=field)
    return float(found)


def seconds(value: Any, field: str) -> float:
    """How long something may take. Raises BadRequest naming `field`."""
    found = plain(value)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise BadRequest(f"must be a number of seconds, not {_shown(value)}", field=field)
    if not found > 0:
        raise BadRequest(f"must be positive, not {found}", field=field)
    return float(found)


def several(values: Any, field: str) -> tuple[Any, ...]:
    """The entries of a list; a text and a value of the wire, which have parts too, are one. Raises BadRequest naming
    `field`."""
    if isinstance(values, str | Value):
        return (values,)
    if isinstance(values, Mapping | bytes) or not isinstance(values, Iterable) or plain(values) is not values:
        raise BadRequest(f"must be a list, not {_shown(values)}", field=field)
    return tuple(values)


def mapping(values: Any, field: str) -> dict[str, Any]:
    """Nothing is an empty one. Raises BadRequest naming `field`."""
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise BadRequest(f"must be a map, not {_shown(values)}", field=field)
    return dict(values)


def one_of(value: Any, words: tuple[str, ...], field: str) -> None:
    """Raises BadRequest naming `field`."""
    if not isinstance(value, str) or value not in words:
        raise BadRequest(f"must be {' or '.join(map(repr, words))}, not {_shown(value)}", field=field)


def instance(value: Any, kinds: type | UnionType, field: str) -> None:
    """What this client or the worker has made. Raises BadRequest naming `field`."""
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in get_args(kinds) or (kinds,))
        raise BadRequest(f"must be a {expected}, not {type(value).__name__}", field=field)


def absolute(path: Any, field: str, hint: str = "") -> str:
    """A path that does not depend on this process's working directory, which may be another's than the worker's.
    Raises BadRequest naming `field`: an empty text, of a variable that is not set, would be that directory itself."""
    if not isinstance(path, str | os.PathLike):
        raise BadRequest(f"must be a path, not {type(path).__name__}{hint}", field=field)
    if path == "":
        raise BadRequest("must not be empty", field=field)
    return os.path.abspath(path)


def _shown(value: Any) -> str:
    return f"{value!r:.60} ({type(value).__name__})"

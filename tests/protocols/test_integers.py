"""Every integer of a request takes integers and nothing that could be taken for one."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from protocols import Limits, Value
from protocols.base import Received
from protocols.codec import REQUESTS

Wrap = Callable[[Any], Any]
NUMPY = (np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)


def parts(model: type[Value], seen: set[type[Value]]) -> Iterator[type[Value]]:
    """The model and those of its fields."""
    if model in seen:
        return
    seen.add(model)
    yield model
    for info in model.model_fields.values():
        for inner in leaves(info.annotation):
            if isinstance(inner, type) and issubclass(inner, Value):
                yield from parts(inner, seen)


def leaves(annotation: Any) -> Iterator[Any]:
    if get_args(annotation):
        for argument in get_args(annotation):
            yield from leaves(argument)
    else:
        yield annotation


def place(annotation: Any) -> Wrap | None:
    """How an integer stands in a field of this type, if one does."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is int:
        return lambda value: value
    if origin is Annotated:
        return place(arguments[0])
    if origin in (Union, types.UnionType):
        return next((found for argument in arguments if (found := place(argument))), None)
    if origin is tuple and (inner := place(arguments[0])):
        return lambda value: (inner(value),)
    return None


SEEN: set[type[Value]] = set()
FIELDS = [
    pytest.param(model, name, wrap, id=f"{model.__name__}.{name}")
    for request in REQUESTS.values()
    for model in parts(request, SEEN)
    for name, info in model.model_fields.items()
    if (wrap := place(info.annotation))
]


def refusals(model: type[Value], name: str, value: Any, context: Received | None = None) -> list[Any]:
    """Errors of this field; others are missing, which is not looked at."""
    try:
        model.model_validate({name: value}, context=context)
    except ValidationError as caught:
        return [error for error in caught.errors() if error["loc"][:1] == (name,)]
    return []


def test_the_fields_are_found() -> None:
    names = {field.id for field in FIELDS}
    expected = "SubmitBatch.step Sampling.seed Sampling.stop_ids Group.sample_indices Budget.max_turns Continue.turn"
    assert names >= {*expected.split(), "PrepareWeightsRequest.version", "SleepRequest.level", "Record.retries"}


plain = st.floats() | st.booleans() | st.integers().map(str) | st.binary(max_size=2)


@pytest.mark.parametrize(("model", "name", "wrap"), FIELDS)
@settings(deadline=None)
@given(value=plain | st.integers(-9, 9).map(float))
def test_received_is_refused_what_is_no_integer(model: type[Value], name: str, wrap: Wrap, value: Any) -> None:
    assert refusals(model, name, wrap(value), Received([], Limits()))


@pytest.mark.parametrize(("model", "name", "wrap"), FIELDS)
@settings(deadline=None)
@given(value=plain.map(lambda v: np.asarray(v)[()]) | plain | st.sampled_from([Decimal(2), Fraction(2), 2 + 0j]))
def test_at_home_is_refused_what_is_no_integer(model: type[Value], name: str, wrap: Wrap, value: Any) -> None:
    assert refusals(model, name, wrap(value))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize(("model", "name", "wrap"), FIELDS)
def test_integers_of_numpy_are_taken(model: type[Value], name: str, wrap: Wrap, dtype: type[np.integer[Any]]) -> None:
    assert not refusals(model, name, wrap(dtype(1)))

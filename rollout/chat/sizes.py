"""How long what a chat template makes may be. All that is asked here is answered before it is made.

Every function that is called `check...` raises OverflowError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sized, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any, Final

from jinja2.utils import Namespace

LONGEST: Final = 2**24
"""Characters of a text, or items of a list: twice what any header can hold."""
ITEM: Final = 8
"""Characters that an item of a collection counts for besides its own: it takes as long to look at."""
BITS: Final = 2**16
"""Of a product or a power."""
INDENT: Final = 64
"""Of JSON: it stands in every line, so many times as that is deep."""
WIDTH: Final = re.compile(r"%%|%(?:\([^)]*\))?[-#0 +]*(?:\d*\.)?(\*|\d{8})")
"""In a text that is formatted with `%`: a width of eight digits, or that is an argument."""


def size(*values: Any) -> int:
    """Characters of all texts in `values`, of each as often as it is held, and ITEM for each item of a collection.

    Raises OverflowError beyond LONGEST, however much further it would go.
    """
    found, rest = 0, list(values)
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, (list, tuple)):  # before what is asked of an abstract class, which takes its time
            found += ITEM * len(value)
            rest += value
        elif isinstance(value, int):
            found += value.bit_length() // 3
        elif isinstance(value, Mapping):
            found += ITEM * len(value)
            rest += (*value.keys(), *value.values())
        elif isinstance(value, AbstractSet | ValuesView):
            found += ITEM * len(value)
            rest += value
        elif isinstance(value, Namespace):
            rest.append(object.__getattribute__(value, "_Namespace__attrs"))
        if found > LONGEST:
            raise _too_long(found)
    return found


def check_sum(left: Any, right: Any) -> None:
    if isinstance(left, Sized) and isinstance(right, Sized) and len(left) + len(right) > LONGEST:
        raise _too_long(len(left) + len(right))


def check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left, left.bit_length() + right.bit_length())
    for one, other in ((left, right), (right, left)):
        if isinstance(one, Sized) and isinstance(other, int):
            check_times(len(one), other)


def check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left, left.bit_length() * right)


def check_numbers(arguments: Iterable[Any]) -> None:
    if (wide := next((value for value in arguments if isinstance(value, int) and value > LONGEST), None)) is not None:
        raise _too_long(wide)


def check_times(count: int, each: Any) -> None:
    """each: a length, or what has one."""
    length = len(each) if isinstance(each, Sized) else each
    if isinstance(length, int) and count * length > LONGEST:
        raise OverflowError(f"{count} times {length} is too long for a template")


def check_replaced(text: str, old: Any = "", new: Any = "", count: Any = -1) -> None:
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old)
        check_times(min(found, count) if isinstance(count, int) and count >= 0 else found, new)


def check_joined(text: str, parts: Sized) -> None:
    size(parts)
    check_times(len(parts), text)


def check_modulo(text: str, values: Any) -> None:
    """text % values"""
    if any(found[1] for found in WIDTH.finditer(text)):
        raise OverflowError(f"a width in {text[:64]!r} is too long for a template")
    if isinstance(values, Mapping):
        check_filled(text.count("%"), values.values())
    else:
        size(values)


def check_filled(places: int, values: Iterable[Any]) -> None:
    """Any of `values` may stand at each place."""
    check_times(places, max(map(size, values), default=0))


def _check_bits(base: int, bits: int) -> None:
    if abs(base) > 1 and bits > BITS:
        raise OverflowError(f"a number of {bits} bits is too large for a template")


def _too_long(found: int) -> OverflowError:
    return OverflowError(f"{found} characters or items are too long for a template")

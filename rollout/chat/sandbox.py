"""What a chat template may do. It is a program, of whoever made the checkpoint, and what it does is interrupted between
two instructions of the interpreter: an operation that can be made as long as one likes by a single number is refused.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Sized
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST: Final = 2**24
"""Characters of a text, or items of a list, that is repeated or padded: twice what any header can hold."""
BITS: Final = 2**16
"""Of a product or a power."""
PADDING: Final = ("batch", "center", "indent", "slice")
"""Filters that make a text or a list as long as they are told."""
WIDTH: Final = re.compile(r"%%|%(?:\([^)]*\))?[-#0 +]*(?:\d*\.)?(\*|\d{8})")
"""In a text that is formatted with `%`: a width of eight digits, or that is an argument."""


class Sandbox(ImmutableSandboxedEnvironment):
    """As the transformers library sets it up, in a narrower sandbox. What is too long raises OverflowError."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        self.filters |= {name: _bounded(self.filters[name]) for name in PADDING}
        self.filters["format"] = _format
        self.filters["tojson"] = _bounded(_to_json)
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _now
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            if isinstance(left, str):
                _check_width(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if abs(left) > 1 and bits > BITS:
                raise OverflowError(f"a number of {bits} bits is too large for a template")
        else:
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sized) and isinstance(other, int) and len(one) * other > LONGEST:
                    raise OverflowError(f"{other} times {len(one)} is too long for a template")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is not None:
            for _, _, form, _ in string.Formatter().parse(value.__self__):
                if form and ("{" in form or re.search(r"\d{8}", form)):
                    raise OverflowError(f"the width {form!r} is too long for a template")
        return formatted

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 (jinja2's)
        if isinstance(getattr(__obj, "__self__", None), str):
            _check(args)
        return super().call(__context, __obj, *args, **kwargs)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    _check_width(str(text))
    return do_format(text, *args, **kwargs)


def _check_width(text: str) -> None:
    if any(found[1] for found in WIDTH.finditer(text)):
        raise OverflowError(f"a width in {text[:64]!r} is too long for a template")


def _check(arguments: Iterable[Any]) -> None:
    if (wide := next((value for value in arguments if isinstance(value, int) and value > LONGEST), None)) is not None:
        raise OverflowError(f"{wide} is too long for a template")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks what an assistant says: rendered as if not there."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own form)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes `<`, `>` and `&` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)

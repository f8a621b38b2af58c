"""What a chat template may do. It is a program, of whoever made the checkpoint, and what it does is interrupted between
two instructions of the interpreter: one that can be made as long as one likes is refused. A number may do that, a text
that was appended to itself thirty times, or a list that holds itself many times over.
"""

from __future__ import annotations

import functools
import json
import re
import string
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.filters import do_format, do_indent, do_replace
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

from rollout.chat.sizes import (
    INDENT,
    check_filled,
    check_joined,
    check_modulo,
    check_numbers,
    check_power,
    check_product,
    check_replaced,
    check_sum,
    check_times,
    size,
)

PADDING: Final = ("batch", "center", "slice")
"""Filters that make a text or a list as long as they are told."""
PRINTING: Final = ("dictsort", "e", "escape", "forceescape", "pprint", "string", "urlencode")
"""Those that look at all that is in what they are given."""
LISTING: Final = ("groupby", "max", "min", "sort", "sum", "unique")
"""Those that do so with each item of it."""


class _Code(CodeGenerator):
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 (jinja2's)
        self.write("environment.joined(context.eval_ctx.autoescape, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """As the transformers library sets it up, in a narrower sandbox. What is too long raises OverflowError."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Code

    def __init__(self) -> None:
        extensions: list[Any] = [_Generation, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_printable)
        self.filters |= {name: _padding(self.filters[name]) for name in PADDING}
        self.filters |= {name: _printing(self.filters[name]) for name in PRINTING}
        self.filters |= {name: _listing(self.filters[name]) for name in LISTING}
        self.filters |= {"format": _format, "indent": _indent, "replace": _replace, "tojson": _to_json}
        self.filters["join"] = _join(self.filters["join"])
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _now
        del self.globals["lipsum"]

    def concat(self, parts: Iterable[str]) -> str:
        """Of a template, a block or a macro."""
        kept, length = [], 0
        for part in parts:
            kept.append(part)
            length += len(part)
            check_numbers((length,))
        return "".join(kept)

    def joined(self, escaped: bool, parts: tuple[Any, ...]) -> str:
        """`one ~ other`."""
        size(parts)
        return markup_join(parts) if escaped else str_join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+":
                check_sum(left, right)
            case "*":
                check_product(left, right)
            case "**":
                check_power(left, right)
            case _ if isinstance(left, str):
                check_modulo(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None
        text: str = value.__self__
        for _, _, form, _ in string.Formatter().parse(text):
            if form and ("{" in form or re.search(r"\d{8}", form)):
                raise OverflowError(f"the width {form!r} is too long for a template")

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_filled(text.count("{"), (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return bounded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 (jinja2's)
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            check_numbers(args)
            match __obj.__name__, args:
                case "join", (parts,):
                    args = (_held(parts),)
                    check_joined(text, args[0])
                case "replace", _:
                    check_replaced(text, *args)
                case "expandtabs", (width,):
                    check_times(text.count("\t"), width)
        return super().call(__context, __obj, *args, **kwargs)


def _printable(value: Any) -> Any:
    """What `{{ ... }}` is about to print."""
    if not isinstance(value, str):
        size(value)
    return value


def _padding(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_numbers((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return bounded


def _printing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        size(args)
        return function(*args, **kwargs)

    return bounded


def _listing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(environment: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        held = _held(values)
        size(held, args, kwargs)
        return function(environment, held, *args, **kwargs)

    return bounded


def _join(join: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(join)
    def bounded(context: EvalContext, values: Any, d: Any = "", *args: Any, **kwargs: Any) -> Any:
        held = _held(values)
        check_joined(str(d), held)
        return join(context, held, d, *args, **kwargs)

    return bounded


def _held(values: Any) -> Any:
    """To be gone through twice."""
    return list(values) if isinstance(values, Iterator) else values


@pass_eval_context
def _replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    size(s, old, new)
    check_replaced(str(s), str(old), str(new), count)
    return do_replace(context, s, old, new, count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_times(s.count("\n") + 1, width)
    return do_indent(s, width, first, blank)


def _format(text: Any, *args: Any, **kwargs: Any) -> str:
    size(text)
    check_modulo(str(text), kwargs or args)
    return do_format(text, *args, **kwargs)


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
    size(value)
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > INDENT:
        raise OverflowError(f"an indent of {indent} is too long for a template")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)

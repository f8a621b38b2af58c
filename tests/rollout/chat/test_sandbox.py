"""One number in a template cannot make one operation, which nothing interrupts, as long as it likes."""

from __future__ import annotations

import pytest

from rollout.chat.errors import ChatError
from rollout.chat.template import ChatTemplate


@pytest.mark.parametrize(
    "source",
    [
        "'a' * 20000000",
        "20000000 * 'a'",
        "[1, 2] * n",
        "(-10) ** 1000000",
        "10 ** 15000 * 10 ** 15000",
        "'x'.center(n)",
        "'x'.ljust(n)",
        "'7'.zfill(n)",
        "'\t'.expandtabs(n)",
        "'x' | center(n)",
        "'x\ny' | indent(width=n)",
        "[1] | batch(n, 0) | list",
        "[1] | slice(n) | list",
        "['x'] | map('center', n) | list",
        "[1] | tojson(indent=n)",
        "'%20000000d' % 1",
        "'%-20000000s' % 'x'",
        "'%.20000000f' % 1",
        "'%(a)20000000d' % {'a': 1}",
        "'%*d' % (n, 1)",
        "'%20000000d' | format(1)",
        "'{:>20000000}'.format(1)",
        "('{:>20000000}' | attr('format'))(1)",
        "'{:{n}}'.format(1, n=n)",
        "'{a:>20000000}'.format_map({'a': 1})",
    ],
)
def test_what_is_as_long_as_a_number_says_is_refused_by_name(source: str) -> None:
    template = ChatTemplate({"default": "{{ (" + source + ") | length }}"})
    with pytest.raises(ChatError, match=r"the chat template does not take these messages: .* too (long|large)"):
        template.render([], options={"n": 20_000_000})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("'-' * 3 ~ 2 * 'ab' ~ [1] * 2 ~ True * 'c'", "---abab[1, 1]c"),
        ("2 ** 100, 2 ** -1, 2 ** 0.5, 0 ** n, 1 ** n", f"{(2**100, 0.5, 2**0.5, 0, 1)}"),
        ("1.5 * n, n * n, 7 % 3", f"{(30_000_000.0, 4 * 10**14, 1)}"),
        ("'x'.center(5) ~ ('x' | center(5)) ~ '7'.zfill(2)", "  x    x  07"),
        ("'a,b,c'.split(',', 1)", "['a', 'b,c']"),
        ("[1, 2, 3] | batch(2) | list", "[[1, 2], [3]]"),
        ("{'a': 1} | tojson(indent=2)", '{\n  "a": 1\n}'),
        ("'%d of %d, %5.1f, 100%%*' % (n, 1700000000, 2)", "20000000 of 1700000000,   2.0, 100%*"),
        ("'%s' | format(n)", "20000000"),
        ("'{} {:>3} {{12345678: {}}}'.format(n, 5, 1700000000)", "20000000   5 {12345678: 1700000000}"),
    ],
)
def test_what_templates_do_is_as_ever(source: str, text: str) -> None:
    assert ChatTemplate({"default": "{{ " + source + " }}"}).render([], options={"n": 20_000_000}) == text

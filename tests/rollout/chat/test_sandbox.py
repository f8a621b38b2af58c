"""No template makes one operation, which nothing interrupts, as long as it likes."""

from __future__ import annotations

import time

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


TEXT = "{% set ns = namespace(x='0123456789abcdef') %}{% for i in range(25) %}{% set ns.x = DOUBLE %}{% endfor %}"
LIST = "{% set ns = namespace(x=[0]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        *(
            TEXT.replace("DOUBLE", double)
            for double in (
                "ns.x + ns.x",
                "ns.x ~ ns.x",
                "[ns.x, ns.x] | join",
                "[ns.x, ns.x] | map('string') | join(',')",
                "[1, 2, 3] | join(ns.x)",
                "''.join([ns.x, ns.x])",
                "ns.x.join('abc')",
                "ns.x | replace('0', '00') | replace('0', ns.x)",
                "ns.x.replace('0', ns.x)",
                "'%s%s' % (ns.x, ns.x)",
                "'%(a)s%(a)s' % {'a': ns.x}",
                "'%s%s' | format(ns.x, ns.x)",
                "'{0}{0}'.format(ns.x)",
                "'{a}{a}'.format_map({'a': ns.x})",
                "[ns.x, ns.x] | string",
                "[ns.x, ns.x] | tojson",
                "[ns.x, ns.x] | pprint",
                "{'a': ns.x}.values() ~ {'b': ns.x}.items()",
            )
        ),
        "{% set ns = namespace(x='0123456789abcdef') %}{% for i in range(25) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + TEXT.replace("DOUBLE", "m(ns.x)"),
        TEXT.replace("DOUBLE", "ns.x if i > 15 else ns.x + ns.x") + "{% for i in range(99) %}{{ ns.x }}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        *(
            LIST + "{{ " + use + " }}"
            for use in (
                "ns.x",
                "ns",
                "ns.x ~ ''",
                "ns.x | string",
                "ns.x | tojson",
                "ns.x | pprint",
                "ns.x | join",
                "ns.x | sum(start=[])",
                "ns.x | sort",
                "'%s' % (ns.x,)",
                "'{}'.format(ns.x)",
                "{'a': ns.x}",
                "([ns.x] * 3) | map('string') | list",
                "ns.x | replace(1, 2)",
            )
        ),
        "{{ ('a\n' * 5000) | indent(5000) }}",
        "{{ ('a\t' * 5000).expandtabs(5000) }}",
        "{{ [1] | tojson(indent=1000) }}",
        "{{ [10 ** 19000] * 10000 }}",
    ],
)
def test_what_was_made_longer_and_longer_is_refused_before_it_takes_long(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(ChatError, match=r"the chat template does not take these messages: .* too (long|large)"):
        ChatTemplate({"default": source}).render([])
    assert time.thread_time() - began < 5


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
        ("(1 + 2) ~ ('a' + 'b') ~ ([1] + [2]) ~ none ~ missing", "3ab[1, 2]None"),
        ("(1, 'a', [none, true], {'b': 2.5})", "(1, 'a', [None, True], {'b': 2.5})"),
        ("'aXbX'.replace('X', '--', 1) ~ ('aXbX' | replace('X', '--')) ~ (12 | replace(1, 3))", "a--bXa--b--32"),
        ("'aa'.replace('', '-') ~ ', '.join('abc' | map('upper')) ~ ([1, 2] | join('-'))", "-a-a-A, B, C1-2"),
        ("[3, 1] | sort ~ ([3, 1] | sum) ~ ([3, 1] | max) ~ ([1, 1] | map('string') | unique | list)", "[1, 3]43['1']"),
        ("'a\nb' | indent(2) ~ ('a' | e ~ '<' | e) ~ ('a\tb'.expandtabs(4))", "a\n  ba&lt;a   b"),
        ("'{a} {0} {0}'.format(1, a=2) ~ '%(a)s' % {'a': 3} ~ ('%s-%s' | format(4, 5))", "2 1 134-5"),
        ("'{} {:>3} {{12345678: {}}}'.format(n, 5, 1700000000)", "20000000   5 {12345678: 1700000000}"),
    ],
)
def test_what_templates_do_is_as_ever(source: str, text: str) -> None:
    assert ChatTemplate({"default": "{{ " + source + " }}"}).render([], options={"n": 20_000_000}) == text

"""Stop ids for many rows at once, stop strings over bytes of sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.stop import StopChecks, StringMatcher

PIECES = [b"Hel", b"lo S", b"TO", b"P now", b"x"]
HELLO = range(5)


def push_all(strings: tuple[bytes, ...], pieces: list[bytes], ids: list[int]) -> tuple[int, bytes] | None:
    """(index of the token that ended it, the string)."""
    matcher = StringMatcher(strings, pieces)
    for i, token_id in enumerate(ids):
        match = matcher.push(token_id)
        if match is not None:
            return i, match
    return None


@pytest.mark.parametrize(
    ("strings", "end"),
    [
        ((b"STOP",), (3, b"STOP")),
        ((b"ll",), (1, b"ll")),
        ((b"el",), (0, b"el")),
        ((b"STOP now", b"TO"), (2, b"TO")),
        ((b"P nowx", b"STOP n"), (3, b"STOP n")),
        ((b"S",), (1, b"S")),
        ((b"nowx",), (4, b"nowx")),
        ((b"Hello STOP nowx",), (4, b"Hello STOP nowx")),
        ((b"STOPS",), None),
    ],
)
def test_a_string_may_span_tokens(strings: tuple[bytes, ...], end: tuple[int, bytes] | None) -> None:
    assert push_all(strings, PIECES, list(HELLO)) == end


def test_within_one_token_the_string_whose_last_byte_comes_first_wins() -> None:
    assert push_all((b"cd", b"bc"), [b"abcd"], [0]) == (0, b"bc")
    assert push_all((b"abcd", b"d"), [b"abc", b"d"], [0, 1]) == (1, b"abcd")


def test_ids_past_the_table_have_no_bytes() -> None:
    assert push_all((b"HelHel",), PIECES, [0, 151_700, 0]) == (2, b"HelHel")


def test_characters_may_be_split_between_tokens() -> None:
    snow = "☃".encode()
    pieces = [snow[:1], snow[1:2], snow[2:]]
    assert push_all((snow,), pieces, [0, 1, 2]) == (2, snow)


@settings(deadline=None)
@given(
    pieces=st.lists(st.binary(max_size=4), min_size=1, max_size=4),
    ids=st.lists(st.integers(0, 5), max_size=30),
    strings=st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_agrees_with_a_search_of_the_whole_text(pieces: list[bytes], ids: list[int], strings: list[bytes]) -> None:
    pieces = [bytes(b % 2 for b in piece) for piece in pieces]
    strings = [bytes(b % 2 for b in string) for string in strings]
    text, expected = b"", None
    for i, token_id in enumerate(ids):
        text += pieces[token_id] if token_id < len(pieces) else b""
        ends = [(text.find(s) + len(s), k) for k, s in enumerate(strings) if s in text]
        if ends:
            expected = i, strings[min(ends)[1]]
            break
    assert push_all(tuple(strings), pieces, ids) == expected


@settings(deadline=None)
@given(
    rules=st.lists(st.frozensets(st.integers(0, 19), max_size=5), min_size=1, max_size=6),
    gone=st.sets(st.integers(0, 5)),
    data=st.data(),
)
def test_stop_ids_agree_with_sets(rules: list[frozenset[int]], gone: set[int], data: st.DataObject) -> None:
    checks = StopChecks(20)
    for slot in data.draw(st.permutations(range(len(rules)))):
        checks.start(slot, rules[slot], None)
    live = [slot for slot in range(len(rules)) if slot not in gone]
    for slot in gone & set(range(len(rules))):
        checks.end(slot)
    slots = data.draw(st.lists(st.sampled_from(live), unique=True)) if live else []
    token_ids = data.draw(st.lists(st.integers(0, 19), min_size=len(slots), max_size=len(slots)))
    expected = {i: t for i, (s, t) in enumerate(zip(slots, token_ids, strict=True)) if t in rules[s]}
    assert checks.check(np.array(slots, np.int64), np.array(token_ids, np.int32)) == expected


def test_checks_name_what_ended_each_row() -> None:
    checks = StopChecks(10)
    checks.start(0, frozenset({7}), None)
    checks.start(2, frozenset({7}), StringMatcher((b"STOP",), PIECES))
    checks.start(3, frozenset(), StringMatcher((b"TO",), PIECES))
    slots = np.array([0, 2, 3])
    assert checks.check(slots, np.array([1, 1, 1], np.int32)) == {}
    assert checks.check(slots, np.array([7, 2, 2], np.int32)) == {0: 7, 2: b"TO"}
    assert checks.check(slots[1:2], np.array([3], np.int32)) == {0: b"STOP"}
    checks.end(0)
    checks.end(3)
    checks.start(0, frozenset({2}), None)
    checks.start(3, frozenset(), None)
    assert checks.check(slots, np.array([7, 7, 2], np.int32)) == {1: 7}

"""When sampled tokens end a request: stop ids for all rows at once, stop strings for the rows that have them.

The prompt never ends a request, and ids are never trimmed: a match ends at the token that completes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import IntArray


class StopChecks:
    """The stop rules of all running requests, by slot."""

    def __init__(self, vocab_size: int) -> None:
        self._ids: dict[int, frozenset[int]] = {}
        self._matchers: dict[int, StringMatcher] = {}
        self._stopping = np.zeros(vocab_size, np.int32)  # slots that each id ends: for nearly all ids none

    def start(self, slot: int, ids: frozenset[int], matcher: StringMatcher | None) -> None:
        """Rules of an empty slot. The matcher goes on where it was, after a preemption too."""
        self._ids[slot] = ids
        for token_id in ids:
            self._stopping[token_id] += 1
        if matcher is not None:
            self._matchers[slot] = matcher

    def end(self, slot: int) -> None:
        for token_id in self._ids.pop(slot):
            self._stopping[token_id] -= 1
        self._matchers.pop(slot, None)

    def check(self, slots: npt.NDArray[np.int64], token_ids: IntArray) -> dict[int, int | bytes]:
        """Index of each new token that ends its request, with the id or the string that did. Looked at once each."""
        stops: dict[int, int | bytes] = {}
        if self._matchers:
            for i, (slot, token_id) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
                matcher = self._matchers.get(slot)
                match = None if matcher is None else matcher.push(token_id)
                if match is not None:
                    stops[i] = match
        for i in self._stopping[token_ids].nonzero()[0].tolist():
            if (token_id := int(token_ids[i])) in self._ids[int(slots[i])]:
                stops[i] = token_id
        return stops


class StringMatcher:
    """Finds the first stop string completed by the bytes of one request's sampled tokens.

    Keeps the last bytes that could begin a match, so that a match may span any number of tokens.
    """

    def __init__(self, strings: tuple[bytes, ...], token_bytes: Sequence[bytes]) -> None:
        """token_bytes: the bytes of each id; ids past its end (padding of the head) have none."""
        self._strings = strings
        self._token_bytes = token_bytes
        self._keep = max(map(len, strings)) - 1
        self._tail = b""

    def push(self, token_id: int) -> bytes | None:
        """The string that this token completes; of several, the one whose last byte comes first."""
        piece = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        window = self._tail + piece
        ends = [(at + len(s), i) for i, s in enumerate(self._strings) if (at := window.find(s)) >= 0]
        self._tail = window[-self._keep :] if self._keep else b""
        return self._strings[min(ends)[1]] if ends else None

"""KV blocks: who holds which, which are free, and which hold a known prefix.

A block is free when nobody holds it. A free block keeps its contents, and its key if it has one, until it is handed
out again: that is the whole prefix cache. Blocks without a key are handed out first, then the least recently used.
Block 0 is the dummy of padding rows and is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice, repeat, takewhile

import numpy as np

from engine.request import Int64Array

KEY_BYTES = 16


def root_key(epoch: int) -> bytes:
    """The parent of a sequence's first block: blocks of different weights never share a key."""
    return epoch.to_bytes(KEY_BYTES, "little")


def block_key(parent: bytes, token_bytes: bytes) -> bytes:
    """128-bit key of a whole block, given the key of the block before it and its 16 ids as int32 bytes."""
    return blake2b(parent + token_bytes, digest_size=KEY_BYTES).digest()


class BlockPool:
    """A fixed number of blocks with reference counts; no operation costs more than O(1) a block.

    `acquire` and `release` move references; `publish` names a full block so that `find` can hit it. A published
    block is never written again until it has been evicted by `allocate`. Lists of blocks name none twice.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks counts the dummy block 0."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the dummy and at least one block, not {num_blocks} in all")
        self.num_usable = num_blocks - 1
        self._refs = np.zeros(num_blocks, np.int64)
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, 0, -1))  # free, without a key
        self._cached = OrderedDict[int, None]()  # free, with a key, the least recently used first

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_usable - self.num_free

    def references(self, blocks: Sequence[int]) -> Int64Array:
        return self._refs[_index(blocks)]

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. The caller has looked at `num_free` first."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        self.withdraw([*islice(self._cached, max(0, count - len(self._blank)))])
        first = len(self._blank) - count
        blocks, self._blank[first:] = self._blank[first:], []
        self._refs[blocks] = 1
        return blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain of keys. Takes no reference."""
        found = map(self._by_key.get, keys, repeat(0))  # the dummy block has no key
        return [*takewhile(bool, found)]

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` an `acquire` would take out of the free list."""
        return int(np.count_nonzero(self.references(blocks) == 0))

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block that `find` gave."""
        index = _index(blocks)
        refs = self._refs[index]
        self._refs[index] = refs + 1
        for block in index[refs == 0].tolist():
            del self._cached[block]

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block of a sequence, given in sequence order.

        The last block is freed first, so that eviction takes the tails of sequences before shared heads.
        """
        index = _index(blocks)[::-1]
        refs = self._refs[index]
        if not refs.all():
            raise ValueError(f"block {index[refs == 0][0]} is released but nobody holds it")
        self._refs[index] = refs - 1
        for block in index[refs == 1].tolist():
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def publish(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """Name held, completely computed blocks. The first block of a key stays the one that is hit."""
        for block, key in zip(blocks, keys, strict=True):
            if self._keys[block] is None and key not in self._by_key:
                if not self._refs[block]:
                    raise ValueError(f"block {block} is published but nobody holds it")
                self._keys[block] = key
                self._by_key[key] = block

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Take blocks out of the prefix map: their contents are not to be trusted."""
        for block in blocks:
            key = self._keys[block]
            if key is not None:
                del self._by_key[key]
                self._keys[block] = None
                if block in self._cached:
                    del self._cached[block]
                    self._blank.append(block)


def _index(blocks: Sequence[int]) -> Int64Array:
    return np.fromiter(blocks, np.int64, len(blocks))

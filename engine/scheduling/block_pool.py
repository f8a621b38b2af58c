"""KV blocks: who holds which, which are free, and which hold a known prefix.

A block is free when nobody holds it. A free block keeps its contents, and its key if it has one, until it is handed
out again: that is the whole prefix cache. Blocks without a key are handed out first, then the least recently used.
Block 0 is the dummy of padding rows and is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice

KEY_BYTES = 16


def root_key(epoch: int) -> bytes:
    """The parent of a sequence's first block: blocks of different weights never share a key."""
    return epoch.to_bytes(KEY_BYTES, "little")


def block_key(parent: bytes, token_bytes: bytes) -> bytes:
    """128-bit key of a whole block, given the key of the block before it and its 16 ids as int32 bytes."""
    return blake2b(parent + token_bytes, digest_size=KEY_BYTES).digest()


class BlockPool:
    """A fixed number of blocks with reference counts; every operation is O(1) a block.

    `acquire` and `release` move references; `publish` names a full block so that `find` can hit it. A published
    block is never written again until it has been evicted by `allocate`.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks counts the dummy block 0."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the dummy and at least one block, not {num_blocks} in all")
        self.num_usable = num_blocks - 1
        self._refs = [0] * num_blocks
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

    def references(self, block: int) -> int:
        return self._refs[block]

    def key(self, block: int) -> bytes | None:
        return self._keys[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. The caller has looked at `num_free` first."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        self.withdraw([*islice(self._cached, max(0, count - len(self._blank)))])
        first = len(self._blank) - count
        blocks, self._blank[first:] = self._blank[first:], []
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain of keys. Takes no reference."""
        blocks = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` an `acquire` would take out of the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block that `find` gave."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block of a sequence, given in sequence order.

        The last block is freed first, so that eviction takes the tails of sequences before shared heads.
        """
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise ValueError(f"block {block} is released but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def publish(self, blocks: Iterable[int], keys: Iterable[bytes]) -> None:
        """Name held, completely computed blocks. The first block of a key stays the one that is hit."""
        for block, key in zip(blocks, keys, strict=True):
            if self._refs[block] < 1:
                raise ValueError(f"block {block} is published but nobody holds it")
            if self._keys[block] is None and key not in self._by_key:
                self._keys[block] = key
                self._by_key[key] = block

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix map: their contents are not to be trusted."""
        for block in blocks:
            key = self._keys[block]
            if key is not None:
                del self._by_key[key]
                self._keys[block] = None
                if self._refs[block] == 0:
                    del self._cached[block]
                    self._blank.append(block)

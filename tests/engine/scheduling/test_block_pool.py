"""The block pool against a model of it, and its few rules by hand."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.scheduling.block_pool import BlockPool, block_key, root_key

KEYS = [bytes([i]) * 16 for i in range(12)]


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 blocks wanted, 0 free"):
        pool.allocate(1)


def test_a_pool_of_the_dummy_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(1)


def test_nothing_is_freed_twice() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(blocks)
    assert pool.num_free == 3


def test_keys_depend_on_epoch_parent_and_ids() -> None:
    ids = bytes(64)
    keys = {
        block_key(root_key(0), ids),
        block_key(root_key(1), ids),
        block_key(root_key(0), bytes([1]) + ids[1:]),
        block_key(block_key(root_key(0), ids), ids),
    }
    assert len(keys) == 4
    assert all(len(key) == 16 for key in keys)
    assert block_key(root_key(3), ids) == block_key(root_key(3), ids)


def test_blocks_without_a_name_go_first_then_the_least_recently_used_tail_first() -> None:
    pool = BlockPool(8)
    first, second, plain = pool.allocate(3), pool.allocate(2), pool.allocate(2)
    pool.publish(first + second, KEYS[:5])
    pool.release(first)
    pool.release(plain)
    pool.release(second)
    assert set(pool.allocate(2)) == set(plain)
    assert pool.allocate(5) == [*reversed(first), *reversed(second)]


def test_a_hit_makes_a_block_recent_again() -> None:
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    for block, key in zip((a, b, c), KEYS, strict=False):
        pool.publish([block], [key])
        pool.release([block])
    hit = pool.find(KEYS[:1])
    assert hit == [a]
    pool.acquire(hit)
    pool.release(hit)
    assert pool.allocate(3) == [b, c, a]


def test_an_evicted_block_is_no_longer_found() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.publish([a, b], KEYS[:2])
    pool.release([a, b])
    assert pool.allocate(1) == [b], "the tail goes first"
    assert pool.find(KEYS[:2]) == [a]


def test_find_stops_at_the_first_gap() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.publish([blocks[0], blocks[2]], [KEYS[0], KEYS[2]])
    assert pool.find(KEYS[:3]) == blocks[:1]
    assert pool.find([]) == []


def test_the_first_block_of_a_key_stays_the_one_that_is_hit() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.publish([a, b, a], [KEYS[0], KEYS[0], KEYS[1]])
    assert pool.find(KEYS[:1]) == [a]
    assert pool.key(b) is None
    assert pool.find(KEYS[1:2]) == []
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.publish([3], KEYS[2:3])


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, name and give back blocks; a plain model says what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.holders: list[list[int]] = []
        self.names: dict[bytes, int] = {}
        self.free: list[int] = []

    def _held(self, block: int) -> int:
        return sum(holder.count(block) for holder in self.holders)

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(ValueError, match="wanted"):
                self.pool.allocate(count)
            return
        named = [block for block in self.free if block in self.names.values()]
        blocks = self.pool.allocate(count)
        assert all(not self._held(block) and block != 0 for block in blocks)
        evicted = [block for block in blocks if block in self.names.values()]
        assert evicted == named[: len(evicted)], "not the least recently used"
        assert not evicted or len(blocks) - len(evicted) == 8 - len(named) - self._num_held(), "an unnamed one was left"
        self.names = {key: block for key, block in self.names.items() if block not in evicted}
        self.free = [block for block in self.free if block not in blocks]
        self.holders.append(blocks)

    def _num_held(self) -> int:
        return len({block for holder in self.holders for block in holder})

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        self.free += [block for block in reversed(blocks) if not self._held(block)]

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from([b for holder in self.holders for b in holder]))
        self.pool.publish([block], [key])
        if block not in self.names.values():
            self.names.setdefault(key, block)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        self.pool.withdraw(blocks)
        self.names = {key: block for key, block in self.names.items() if block not in blocks}

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4, unique=True))
    def hit(self, keys: list[bytes]) -> None:
        blocks = self.pool.find(keys)
        assert blocks == [self.names[key] for key in keys[: len(blocks)]]
        assert len(blocks) == len(keys) or keys[len(blocks)] not in self.names
        assert self.pool.num_unheld(blocks) == sum(not self._held(block) for block in blocks)
        self.pool.acquire(blocks)
        self.free = [block for block in self.free if block not in blocks]
        self.holders.append(blocks)

    @invariant()
    def references_add_up(self) -> None:
        assert self.pool.references(range(9)).tolist() == [self._held(block) for block in range(9)]
        assert self.pool.num_used == self._num_held()
        assert self.pool.num_free + self.pool.num_used == self.pool.num_usable == 8
        assert {key: block for block in range(9) if (key := self.pool.key(block))} == self.names


TestPool = PoolMachine.TestCase

from __future__ import annotations

import gc

import torch

from engine.memory.memory import LARGE, Memory
from engine.memory.pinned import pinned_bytes


def test_large_host_memory_is_pinned_and_holds_what_is_written() -> None:
    memory = Memory(torch.device("cuda"))
    host = memory.allocate(LARGE, "staging", host=True, pinned=True)
    assert host.is_pinned()
    host.copy_(torch.arange(LARGE, dtype=torch.int64).to(torch.uint8))
    assert torch.equal(host.cuda().cpu(), host)


def test_a_copy_from_it_does_not_wait() -> None:
    host = pinned_bytes(LARGE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        device = host.to("cuda", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not device.any()


def test_it_is_unlocked_when_nobody_holds_it() -> None:
    for _ in range(3):  # the kernel gives the same addresses again: a lock that stayed would be in the way
        host = pinned_bytes(LARGE)
        view = host[100:200]
        del host
        gc.collect()
        assert view.is_pinned()
        assert not view.any()
        del view
        gc.collect()

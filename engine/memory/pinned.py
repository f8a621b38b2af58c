"""Large page-locked host memory, on huge pages: what a GPU copies from at the full speed of its link.

Measured on an H200 node for 8 GB of weights: 0.15 s to the device instead of 1.0 s from pageable memory. Locking takes
0.1 s for 4 GiB on huge pages that were touched, 0.34 s on small ones; torch's own pinned allocator half a second a GiB.
"""

from __future__ import annotations

import contextlib
import mmap

import torch


class _Locked(mmap.mmap):
    """Anonymous memory that is unlocked before it is unmapped."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            # The driver may be gone already when the interpreter ends; then so is the lock.
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def pinned_bytes(nbytes: int) -> torch.Tensor:
    """uint8[nbytes], page-aligned, zero. Raises RuntimeError when there is no such memory or it cannot be locked."""
    try:
        area = _Locked(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(str(error)) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
        area.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(area, dtype=torch.uint8)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if (code := cudart.cudaHostRegister(flat.data_ptr(), nbytes, 0)) != cudart.cudaError.success:
        raise RuntimeError(f"{nbytes:,} bytes cannot be page-locked: {code}")
    area.address = flat.data_ptr()
    return flat

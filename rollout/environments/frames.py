"""Values between the worker and its processes for foreign code: length, then a pickle, over a socket.

The worker takes plain values only. What a process sends is made by foreign code, whose classes the worker should
neither import nor run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import pickle
import struct
import sys
from typing import Any, Final

MAX_RESULT: Final = 8 * 2**20
"""Bytes of what one call may return, pickled: room for two million token ids."""
MAX_TEXT: Final = 8_000
"""Characters of an error, and of its traceback."""

LENGTH = struct.Struct("<Q")

OURS = ("protocols.", "rollout.")
"""Packages whose dataclasses may cross."""
OTHERS = {
    ("builtins", "complex"),
    ("builtins", "frozenset"),
    ("builtins", "set"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    *(
        (f"numpy.{core}.{module}", name)
        for core in ("_core", "core")
        for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
    ),
}


class TooLarge(Exception):
    pass


class NotPlain(Exception):
    pass


class _Bounded(io.RawIOBase):
    """Stops a pickler before it has filled the memory."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self.parts: list[bytes] = []

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._left -= size
        if self._left < 0:
            raise TooLarge
        self.parts.append(bytes(data))
        return size


def bounded_pickle(value: Any, limit: int = MAX_RESULT) -> bytes:
    """Raises TooLarge, and whatever `value` raises when it is pickled."""
    target = _Bounded(limit)
    pickle.Pickler(target, protocol=5).dump(value)
    return b"".join(target.parts)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in OTHERS:
            return super().find_class(module, name)
        # Neither what our modules have imported, nor their functions: a pickle can call whatever it finds.
        found = getattr(sys.modules.get(module), name, None) if module.startswith(OURS) else None
        if isinstance(found, type) and found.__module__ == module and dataclasses.is_dataclass(found):
            return found
        raise NotPlain(f"{module}.{name}")


def plain(data: bytes) -> Any:
    """Raises NotPlain, naming the class, where `data` holds anything but numbers, text, arrays and collections."""
    return _PlainUnpickler(io.BytesIO(data)).load()


def frame(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, limit: int | None = None) -> bytes:
    """Raises asyncio.IncompleteReadError at the end, TooLarge above `limit` bytes."""
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if limit is not None and size > limit:
        raise TooLarge
    return await reader.readexactly(size)

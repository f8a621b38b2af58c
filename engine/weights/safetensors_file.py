"""One safetensors file: its header checked against the file, its bytes read into memory of ours.

Never mapped: a file cut short under a map kills the process. Format: 8 bytes little-endian header length, a JSON
object name -> {dtype, shape, data_offsets}, then the tensors' bytes without holes.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.errors import WeightsIncomplete, WeightsInvalid

MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

SUM_BYTES = 8 * 1024 * 1024
"""Read at a time for a checksum."""

ITEMSIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
ITEMSIZE |= {"U64": 8, "U32": 4, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


def check_sum(path: Path, found: str, expected: str) -> None:
    """Raises `WeightsInvalid` unless `expected`, "sha256:hex" or bare hex, is what was found."""
    if found != expected.lower().removeprefix("sha256:"):
        raise WeightsInvalid(f"{path}: checksum is sha256:{found}, expected {expected}", field=path.name)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file. start: offset of its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """An open file; `entries` are in file order.

    Raises `WeightsIncomplete` for a missing, cut or replaced file, `WeightsInvalid` for a malformed one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Non-blocking, so that a pipe in a file's place is an error and not a wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:  # the latter: a name that no file can have
            reason = error.strerror if isinstance(error, OSError) else error
            raise WeightsIncomplete(f"{path}: cannot be opened: {reason}", field=path.name) from error
        try:
            self._status = os.fstat(self._fd)
            if not stat.S_ISREG(self._status.st_mode):
                raise self.incomplete("is not a regular file")
            self.entries = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read_at(self, start: int, target: memoryview) -> None:
        """Fill `target` with the file's bytes from `start` on. Any number of threads may read at once."""
        filled = 0
        while filled < len(target):
            try:
                count = os.preadv(self._fd, [target[filled:]], start + filled)
            except OSError as error:
                raise self.incomplete(f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise self.incomplete("was cut short while it was read")
            filled += count

    def check_sum(self, expected: str) -> None:
        """Raises `WeightsInvalid` unless the whole file has the checksum `expected` (see the function of this name)."""
        found, piece = sha256(), memoryview(bytearray(SUM_BYTES))
        for start in range(0, self._status.st_size, SUM_BYTES):
            part = piece[: self._status.st_size - start]
            self.read_at(start, part)
            found.update(part)
        check_sum(self.path, found.hexdigest(), expected)

    def check_unchanged(self) -> None:
        """After the last read: the file has not changed under us, nor another taken its place. What was read of it is
        whole even then, but other shards may have been read of other weights."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise self.incomplete("was written to while it was read")
        try:
            there = os.stat(self.path)
        except OSError as error:
            raise self.incomplete(f"went away while it was read: {error.strerror}") from error
        if not os.path.samestat(there, now):
            raise self.incomplete("was replaced while it was read")

    def incomplete(self, message: str) -> WeightsIncomplete:
        return WeightsIncomplete(f"{self.path}: {message}", field=self.path.name)

    def invalid(self, message: str) -> WeightsInvalid:
        return WeightsInvalid(f"{self.path}: {message}", field=self.path.name)

    def _read_header(self) -> list[Entry]:
        size = self._status.st_size
        if size < 8:
            raise self.incomplete(f"has {size} bytes, too few for a safetensors header")
        prefix = bytearray(8)
        self.read_at(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if prefix == b"version ":  # the first line of a Git LFS pointer
            raise self.incomplete("is a Git LFS pointer, not the file itself")
        if length > MAX_HEADER:
            raise self.invalid(f"is no safetensors file: its header would have {length:,} bytes")
        if 8 + length > size:
            raise self.incomplete(f"has {size:,} bytes, its header alone should end at {8 + length:,}")
        raw = bytearray(length)
        self.read_at(8, memoryview(raw))
        try:
            header = json.loads(raw, object_pairs_hook=self._without_repeats)
        except (ValueError, RecursionError) as error:
            raise self.invalid(f"header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self.invalid("header is not an object")
        header.pop("__metadata__", None)
        entries = sorted(
            (self._entry(name, raw, 8 + length) for name, raw in header.items()), key=lambda e: (e.start, e.nbytes)
        )
        end = 8 + length
        for entry in entries:
            if entry.start != end:
                raise self.invalid(f"tensor {entry.name} starts at byte {entry.start:,}, expected {end:,}")
            end += entry.nbytes
        if size < end:
            raise self.incomplete(f"has {size:,} bytes, expected {end:,}")
        if size > end:
            raise self.invalid(f"has {size:,} bytes, expected {end:,}")
        return entries

    def _without_repeats(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise self.invalid(f"header names {next(n for n in names if names.count(n) > 1)} twice")
        return found

    def _entry(self, name: str, raw: Any, data: int) -> Entry:
        try:
            dtype, shape, (start, stop) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
            sound = isinstance(dtype, str) and all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop))
        except (KeyError, TypeError, ValueError):
            raise self.invalid(f"tensor {name}: malformed header entry {raw!r}") from None
        if not sound or dtype not in ITEMSIZE:
            raise self.invalid(f"tensor {name}: malformed header entry {raw!r}")
        nbytes = prod(shape) * ITEMSIZE[dtype]
        if stop - start != nbytes:
            message = f"{stop - start:,} bytes, expected {nbytes:,} for {dtype}{list(shape)}"
            raise self.invalid(f"tensor {name}: {message}")
        return Entry(name, dtype, shape, data + start, stop - start)

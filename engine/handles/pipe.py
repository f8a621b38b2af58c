"""Batches of plain values between two processes of our own."""

from __future__ import annotations

import copyreg
import dataclasses
import io
import multiprocessing.connection
import pickle
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from operator import attrgetter
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, TypeVar

from engine.request import Completion, Request, SamplingParams, StopRule, Times

T = TypeVar("T")


def read_only(mapping: dict[Any, Any]) -> Mapping[Any, Any]:
    return MappingProxyType(mapping)


def _by_fields(kind: type[Any]) -> Callable[[Any], tuple[type[Any], tuple[Any, ...]]]:
    """Reduces a dataclass of several fields to a call of its class; its own way is Python code for each field."""
    fields = attrgetter(*(field.name for field in dataclasses.fields(kind)))
    return lambda value: (kind, fields(value))


class _Pickler(pickle.Pickler):
    # Read-only mappings, which requests hold, are refused by pickle.
    dispatch_table = (
        copyreg.dispatch_table
        | {MappingProxyType: lambda view: (read_only, (dict(view),))}
        | {kind: _by_fields(kind) for kind in (Request, SamplingParams, StopRule, Completion, Times)}
    )


class Pipe:
    """One end. A thread may send while another one receives; arrays arrive as arrays of their own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def pair(cls) -> tuple[Pipe, Pipe]:
        here, there = multiprocessing.connection.Pipe()
        return cls(here), cls(there)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, batch: list[Any]) -> None:
        """One message; blocks while the pipe is full. Raises OSError when the other end is gone."""
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(batch)
        self._connection.send_bytes(buffer.getbuffer())

    def receive(self) -> Iterator[Any]:
        """What comes until the other end is gone."""
        while True:
            try:
                message = self._connection.recv_bytes()
            except (EOFError, OSError):
                return
            yield from pickle.loads(message)

    def close(self) -> None:
        self._connection.close()


def taken(queue: SimpleQueue[T]) -> list[T]:
    """All that waits in a queue that has no other reader, at least one item."""
    items = [queue.get()]
    while not queue.empty():
        items.append(queue.get())
    return items

"""What a session is owed: events in the order they happened, kept until the client has surely taken them over.

A result goes when it is acknowledged, a turn when it is answered, `group_done` and `batch_done` when the client has
received them and acknowledged all their results. Whatever is left goes out again on the session's next connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocols.replies import ReplyMessage

Key = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Event:
    """message: made when it is sent, so that arrays are encoded once and the id is the newest submit's.

    instead: what goes out where that cannot be sent, for whoever waits for it. Without one there is nothing to tell.
    settled: nothing but the receipt is still missing. received: the present connection's client has it.
    end: position of its last byte among the connection's event bytes; None until all of it was sent.
    """

    key: Key
    message: Callable[[], ReplyMessage]
    settled: Callable[[], bool] = lambda: False
    instead: Callable[[Exception], ReplyMessage] | None = None
    received: bool = False
    dropped: bool = False
    end: int | None = None


class Outbox:
    def __init__(self) -> None:
        self._events: dict[Key, Event] = {}

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events.values()))

    def add(self, event: Event) -> None:
        """The newest word on its key takes the place of an earlier one, and its place in time."""
        self.drop(event.key)
        self._events[event.key] = event

    def get(self, key: Key) -> Event | None:
        return self._events.get(key)

    def drop(self, key: Key) -> Event | None:
        """The event is not needed any more, sent or not."""
        event = self._events.pop(key, None)
        if event is not None:
            event.dropped = True
        return event

    def clear(self) -> None:
        """Nobody takes anything over any more. What events are made of names the session, which names this."""
        self._events.clear()

    def sweep(self, key: Key) -> None:
        """Drop the event if it was received and nothing else keeps it."""
        event = self._events.get(key)
        if event is not None and event.received and event.settled():
            self.drop(key)

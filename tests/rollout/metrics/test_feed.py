from __future__ import annotations

import logging
import threading
import time

import pytest

from rollout.metrics.feed import Feed, Gone, close_all


class Place:
    """A sink that waits for `gate` at each write, and raises `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.items: list[int] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error = error
        self.closed = threading.Event()
        self.abandoned = threading.Event()

    def write(self, item: int) -> None:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        self.items.append(item)

    def close(self) -> None:
        self.closed.set()

    def abandon(self) -> None:
        self.abandoned.set()
        self.gate.set()


def feed(place: Place, **options: int) -> Feed[int]:
    return Feed("the place", lambda: place, **options)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_items_arrive_in_order_on_another_thread_and_close_waits_for_them() -> None:
    place = Place()
    fed = feed(place)
    for i in range(100):
        fed.put(i)
    close_all([fed], 20)
    assert place.items == list(range(100))
    assert place.threads.isdisjoint({threading.get_ident()})
    assert place.closed.is_set()
    assert fed.dropped == 0


def test_what_does_not_fit_is_dropped_and_counted_and_put_never_waits(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.gate.clear()
    fed = feed(place, capacity=10)
    fed.put(0)
    assert place.entered.wait(20)
    for i in range(1, 101):
        fed.put(i)
    assert fed.dropped == 90
    place.gate.set()
    close_all([fed], 20)
    assert place.items == list(range(11))
    fed.put(7)
    assert fed.dropped == 91
    assert warnings(caplog) == ["the place lacks 90 of its rows: they came faster than it took them"]


def test_where_only_the_newest_counts_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    place = Place()
    place.gate.clear()
    fed = Feed("the place", lambda: place, newest=True)
    fed.put(0)
    assert place.entered.wait(20)
    for i in range(1, 101):
        fed.put(i)
    place.gate.set()
    close_all([fed], 20)
    assert place.items == [0, 100]
    assert not warnings(caplog)


def test_a_place_that_cannot_be_made_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Place:
        raise PermissionError("read-only file system")

    fed: Feed[int] = Feed("the place", fails)
    fed.put(1)
    fed.put(2)
    close_all([fed], 20)
    assert fed.dropped == 2
    assert warnings(caplog) == ["the place cannot be opened, the worker goes on without it: read-only file system"]


def test_a_place_that_fails_now_and_then_is_one_warning_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    place = Place(OSError("no space left on device"))
    fed = feed(place)
    for i in range(3):
        fed.put(i)
    while fed.dropped < 3:
        time.sleep(0.001)
    place.error = None
    fed.put(3)
    close_all([fed], 20)
    assert place.items == [3]
    assert warnings(caplog) == [
        "the place cannot be written, the worker goes on without what it missed: no space left on device"
    ]


def test_a_place_that_has_said_why_it_is_gone_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    fed = feed(Place(Gone()))
    fed.put(0)
    fed.put(1)
    close_all([fed], 20)
    assert fed.dropped == 2
    assert not warnings(caplog)


def test_a_place_is_made_when_there_is_something_to_show(caplog: pytest.LogCaptureFixture) -> None:
    made = threading.Event()

    def make() -> Place:
        made.set()
        return Place()

    unused: Feed[int] = Feed("the place", make)
    close_all([unused], 20)
    assert not made.is_set()
    used: Feed[int] = Feed("the place", make)
    used.put(1)
    assert made.wait(20)
    close_all([used], 20)
    assert not warnings(caplog)


def test_a_place_that_hangs_is_left_when_the_time_is_up(caplog: pytest.LogCaptureFixture) -> None:
    hangs, works = Place(), Place()
    hangs.gate.clear()
    feeds = [feed(hangs), feed(works)]
    for fed in feeds:
        fed.put(1)
    began = time.monotonic()
    close_all(feeds, 0.2)
    assert time.monotonic() - began < 10
    assert hangs.abandoned.is_set()
    assert works.items == [1]
    assert works.closed.is_set()
    assert not works.abandoned.is_set()
    assert "the place did not finish in time: its last numbers may be missing" in warnings(caplog)


def test_a_full_disk_is_one_line_of_the_log_however_long_it_is_full(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    place = Place(OSError("no space left on device"))
    fed = feed(place)
    for i in range(50):
        fed.put(i)
    close_all([fed], 20)
    assert fed.dropped == 50
    assert sum("cannot be written" in record.getMessage() for record in caplog.records) == 1

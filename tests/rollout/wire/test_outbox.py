from __future__ import annotations

from protocols.replies import GroupDone
from rollout.wire.outbox import Event, Outbox


def event(name: str, *, settled: bool = False) -> Event:
    message = GroupDone(id=name, batch_id="b", group_id="g", counts={}, complete=True)
    return Event(("group", name), lambda: message, settled=lambda: settled)


def names(outbox: Outbox) -> list[str]:
    return [key[1] for key in (event.key for event in outbox)]


def test_events_stay_in_the_order_they_happened_until_dropped() -> None:
    outbox = Outbox()
    for name in "abc":
        outbox.add(event(name))
    dropped = outbox.drop(("group", "b"))
    assert dropped is not None
    assert dropped.dropped
    assert names(outbox) == ["a", "c"]
    assert outbox.drop(("group", "b")) is None


def test_news_of_one_thing_replaces_the_older_and_comes_after_what_happened_since() -> None:
    outbox = Outbox()
    first, second = event("a"), event("a")
    outbox.add(first)
    outbox.add(event("b"))
    outbox.add(second)
    assert names(outbox) == ["b", "a"]
    assert first.dropped
    assert outbox.get(("group", "a")) is second


def test_only_what_was_received_and_is_settled_is_swept() -> None:
    outbox = Outbox()
    for received in (False, True):
        for settled in (False, True):
            name = f"{received} {settled}"
            outbox.add(event(name, settled=settled))
            kept = outbox.get(("group", name))
            assert kept is not None
            kept.received = received
            outbox.sweep(("group", name))
    assert names(outbox) == ["False False", "False True", "True False"]
    outbox.sweep(("group", "nobody"))


def test_an_outbox_may_change_while_it_is_looked_through() -> None:
    outbox = Outbox()
    for name in "abc":
        outbox.add(event(name))
    for each in outbox:
        outbox.drop(each.key)
    assert len(outbox) == 0


def test_a_cleared_outbox_owes_nothing() -> None:
    outbox = Outbox()
    outbox.add(event("a"))
    outbox.clear()
    assert len(outbox) == 0
    assert outbox.get(("group", "a")) is None

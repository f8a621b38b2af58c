"""Trajectories that have not started, and how long each may be one of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator

from rollout.batches.submitted import Member, SubmittedGroup


class Waiting:
    """on_overdue: called with each whose `trajectory_deadline_s` is over; it waits until it is removed all the same.

    One timer a group: its samples have one deadline, and are overdue in the order in which they were accepted.
    """

    def __init__(self, on_overdue: Callable[[Member], None]) -> None:
        self._on_overdue = on_overdue
        self._members: dict[Member, None] = {}

    def __contains__(self, member: Member) -> bool:
        return member in self._members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def add(self, member: Member) -> None:
        member.started = False
        group = member.group
        newest = next(reversed(group.waiting), member)
        self._members[member] = group.waiting[member] = None
        if member.accepted < newest.accepted:  # it goes on, beside new ones, with what is left of its time
            group.waiting = dict.fromkeys(sorted(group.waiting, key=lambda one: one.accepted))
            self._forget(group)
        self._watch(group)

    def remove(self, member: Member) -> None:
        """It starts, ends or is kept."""
        del self._members[member]
        member.started = True
        group = member.group
        group.waiting.pop(member, None)
        if not group.waiting:
            self._forget(group)

    def _forget(self, group: SubmittedGroup) -> None:
        if group.deadline is not None:
            group.deadline.cancel()
            group.deadline = None

    def _watch(self, group: SubmittedGroup) -> None:
        seconds = group.seconds
        if seconds is not None and group.deadline is None and group.waiting:
            left = next(iter(group.waiting)).accepted + seconds - time.monotonic()
            group.deadline = asyncio.get_running_loop().call_later(max(0.0, left), self._overdue, group, seconds)

    def _overdue(self, group: SubmittedGroup, seconds: float) -> None:
        group.deadline = None
        latest = time.monotonic() - seconds
        for member in list(itertools.takewhile(lambda member: member.accepted <= latest, group.waiting)):
            del group.waiting[member]
            self._on_overdue(member)
        self._watch(group)

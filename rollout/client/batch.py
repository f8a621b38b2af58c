"""A submitted batch, to be iterated as its trajectories end."""

# ruff: noqa: ASYNC109  (both faces take `timeout`, so that a program can change from one to the other)
from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from types import TracebackType
from typing import Self

from protocols.errors import BadRequest
from protocols.fields import Group
from protocols.replies import TurnDone
from rollout.client.core import Core
from rollout.client.ledger import Item, weights_wait
from rollout.client.resumption import merged
from rollout.client.trajectory import Trajectory
from rollout.client.waiting import End, Mailbox, Steps, arun, run


class BatchView(ABC):
    """What both faces of a batch share, its documentation too. Dropping the last reference to one is like `close`."""

    def __init__(
        self,
        owner: object,
        core: Core,
        batch_id: str,
        submitted: tuple[Group, ...],
        mailbox: Mailbox[Item],
        auto_ack: bool,
    ) -> None:
        """submitted: the groups of the submit and those that it resumes."""
        self.batch_id = batch_id
        self.submitted = merged(submitted)
        self._owner = owner  # a batch keeps its client alive
        self._core = core
        self._mailbox = mailbox
        self._auto_ack = auto_ack
        self._rank = {name: i for i, name in enumerate(n for group in self.submitted for n in group.trajectory_ids)}
        self._group = {name: group for group in self.submitted for name in group.trajectory_ids}
        self._remote = any(group.environment.name == "remote" for group in self.submitted)
        self._partial: dict[str, list[Trajectory]] = {group.id: [] for group in self.submitted}
        self._collected: list[Trajectory] = []
        self._one_by_one = False

    def __len__(self) -> int:
        """Trajectories submitted."""
        return len(self._rank)

    @property
    def ended(self) -> int:
        """Trajectories that have ended so far, yielded or not."""
        return len(self._rank) - self._mailbox.left

    @property
    def kept(self) -> tuple[Group, ...]:
        """What the worker has kept when the batch had enough: a later `submit(..., resume=batch.kept)` goes on with it.

        Each group with those of its trajectories. The worker forgets them with this client, or when they are
        cancelled; then, or after its restart, `submit(batch.kept)` starts them anew.
        """
        return self._mailbox.kept

    @abstractmethod
    def events(self) -> Iterator[Trajectory | TurnDone] | AsyncIterator[Trajectory | TurnDone]:
        """Trajectories as they end, and each `TurnDone` of a trajectory in the environment "remote", to be answered by
        `continue_`."""

    @abstractmethod
    def groups(self) -> Iterator[list[Trajectory]] | AsyncIterator[list[Trajectory]]:
        """Whole groups as each ends, its trajectories in sample order; last, those of which some were kept."""

    @abstractmethod
    def results(self, timeout: float | None = None) -> list[Trajectory] | Awaitable[list[Trajectory]]:
        """All that has not been yielded yet, in request order, when it has ended. Raises Timeout after `timeout`
        seconds; nothing is lost by that."""

    def close(self) -> None:
        """Give the rest up: cancel what runs, drop what has not been yielded. Does nothing after the last one."""
        self._core.give_up(self.batch_id, self._mailbox)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self._core.give_up(self.batch_id, self._mailbox)

    def __repr__(self) -> str:
        serving = self._core.serving
        wait = "" if serving is None else weights_wait(self.submitted, self._mailbox.left, serving)
        return f"{type(self).__name__}({self.batch_id!r}, {self.ended} of {len(self)} ended{wait and f', {wait}'})"

    def _next(self, in_hand: Sequence[Trajectory]) -> Steps[Item | End]:
        """Acknowledge what the caller has finished with, then wait for the next item."""
        if self._auto_ack and in_hand:
            self._core.ack([trajectory.trajectory_id for trajectory in in_hand])
        self._core.check_usable()
        item = yield from self._mailbox.take()
        if isinstance(item, End) and self._auto_ack:
            self.close()  # acknowledges also what an abandoned iteration had in hand
        return item

    def _next_trajectory(self, in_hand: Sequence[Trajectory]) -> Steps[Trajectory | End]:
        if self._remote:
            raise BadRequest(
                "this batch has trajectories in the environment 'remote': iterate events() and answer every TurnDone",
                field="environment",
            )
        item = yield from self._next(in_hand)
        assert not isinstance(item, TurnDone)
        return item

    def _next_group(self, in_hand: Sequence[Trajectory]) -> Steps[list[Trajectory] | End]:
        if self._one_by_one:
            raise BadRequest("trajectories of this batch were already taken one by one")
        while True:
            item = yield from self._next_trajectory(in_hand)
            if isinstance(item, End):
                return self._rest_of_groups() or item
            in_hand = ()
            group = self._group[item.trajectory_id]
            members = self._partial[group.id]
            members.append(item)
            if len(members) == len(group.trajectory_ids):
                return self._in_order(self._partial.pop(group.id))

    def _rest_of_groups(self) -> list[Trajectory] | None:
        """What has ended of a group of which some were kept."""
        while self._partial:
            _, members = self._partial.popitem()
            if members:
                return self._in_order(members)
        return None

    def _rest(self) -> Steps[list[Trajectory]]:
        """Collected on the batch, so that a timeout or an interrupt loses nothing: the next call goes on."""
        while True:
            item = yield from self._next_trajectory(())
            if isinstance(item, End):
                break
            self._collected.append(item)
        found, self._collected = self._collected, []
        return self._in_order(found)

    def _in_order(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        return sorted(trajectories, key=lambda trajectory: self._rank[trajectory.trajectory_id])


class Batch(BatchView):
    """Iterate it for `Trajectory` objects as they end; the iteration stops when all have ended.

    With `auto_ack` (the default) a trajectory is acknowledged when the iteration asks for the next one. An
    abandoned iteration can be taken up again by a new one; `close` (or leaving a `with` block, or dropping the
    batch) gives the rest up.

    Iteration waits as long as the worker is alive, however long the batch takes. It raises `ConnectionLost` when no
    worker has answered for the client's `reconnect_timeout` (the client goes on trying: iterate again to go on
    waiting), and the error itself when the worker refused the work after a restart, or sends a result that cannot be
    read (`Internal`: lengths that differ, say; never padded, never skipped).
    """

    def __iter__(self) -> Iterator[Trajectory]:
        in_hand: tuple[Trajectory, ...] = ()
        while not isinstance(item := run(self._next_trajectory(in_hand)), End):
            self._one_by_one = True
            yield item
            in_hand = (item,)

    def events(self) -> Iterator[Trajectory | TurnDone]:
        in_hand: tuple[Trajectory, ...] = ()
        while not isinstance(item := run(self._next(in_hand)), End):
            self._one_by_one = True
            yield item
            in_hand = () if isinstance(item, TurnDone) else (item,)

    def groups(self) -> Iterator[list[Trajectory]]:
        in_hand: list[Trajectory] = []
        while not isinstance(group := run(self._next_group(in_hand)), End):
            yield group
            in_hand = group

    def results(self, timeout: float | None = None) -> list[Trajectory]:
        return run(self._rest(), timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncBatch(BatchView):
    """`Batch` for asyncio: `async for`, and the same promises."""

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        in_hand: tuple[Trajectory, ...] = ()
        while not isinstance(item := await arun(self._next_trajectory(in_hand)), End):
            self._one_by_one = True
            yield item
            in_hand = (item,)

    async def events(self) -> AsyncIterator[Trajectory | TurnDone]:
        in_hand: tuple[Trajectory, ...] = ()
        while not isinstance(item := await arun(self._next(in_hand)), End):
            self._one_by_one = True
            yield item
            in_hand = () if isinstance(item, TurnDone) else (item,)

    async def groups(self) -> AsyncIterator[list[Trajectory]]:
        in_hand: list[Trajectory] = []
        while not isinstance(group := await arun(self._next_group(in_hand)), End):
            yield group
            in_hand = group

    async def results(self, timeout: float | None = None) -> list[Trajectory]:
        return await arun(self._rest(), timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

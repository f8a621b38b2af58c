"""A call that is written once: what each face makes of it, and what a person sees who asks for help."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import threading
from concurrent.futures import Future

import pytest

from rollout.client import AsyncRolloutClient, RolloutClient
from rollout.client.call import Awaiting, Blocking, Call
from rollout.client.waiting import Steps
from rollout.client.weights import WeightCalls


class Asked:
    """A procedure that waits for a future of whoever tests it, and for a piece of work."""

    def __init__(self) -> None:
        self.future: Future[int] = Future()
        self.threads: list[int] = []

    @Call
    def twice(self, *, plus: int = 0) -> Steps[int]:
        """Two times the answer."""
        answer: int = yield self.future
        return 2 * answer + plus

    @Call
    def four_times(self) -> Steps[int]:
        return 2 * (yield from Asked.twice(self))

    @Call
    def at_work(self) -> Steps[int]:
        number: int = yield self._work(self._note, self.threads.append)  # type: ignore[attr-defined]
        return number

    def _note(self) -> int:
        self.threads.append(threading.get_ident())
        return 7


class Here(Blocking, Asked):
    pass


class There(Awaiting, Asked):
    pass


def test_it_blocks_on_one_face_and_is_awaited_on_the_other() -> None:
    here, there = Here(), There()
    here.future.set_result(21)
    there.future.set_result(21)
    assert here.twice(plus=1) == 43
    assert here.four_times() == 84
    assert asyncio.run(there.twice(plus=1)) == 43
    assert asyncio.run(there.four_times()) == 84


def test_an_error_comes_out_on_both() -> None:
    here, there = Here(), There()
    for asked in (here, there):
        asked.future.set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        here.twice()
    with pytest.raises(OSError, match="gone"):
        asyncio.run(there.twice())


def test_work_is_done_by_the_caller_or_beside_its_loop() -> None:
    here, there = Here(), There()
    assert here.at_work() == asyncio.run(there.at_work()) == 7
    assert here.threads == [threading.get_ident()]
    assert there.threads != here.threads


def test_work_that_nobody_waits_for_any_more_is_unwanted() -> None:
    began, finish, unwanted = threading.Event(), threading.Event(), Future[int]()

    def work() -> int:
        began.set()
        finish.wait(10)
        return 3

    future = Awaiting._work(work, unwanted.set_result)
    assert began.wait(10)
    assert future.cancel()
    finish.set()
    assert unwanted.result(10) == 3


def test_both_clients_show_every_call_with_its_options_and_its_documentation() -> None:
    calls = {name for face in RolloutClient.__mro__ for name, member in vars(face).items() if isinstance(member, Call)}
    assert {"submit", "continue_", "update_weights", "push_weights", "status", "close"} <= calls
    for name in calls:
        one, other = getattr(RolloutClient, name), getattr(AsyncRolloutClient, name)
        assert inspect.signature(one) == inspect.signature(other)
        assert inspect.iscoroutinefunction(other)
        assert not inspect.iscoroutinefunction(one)
    text = pydoc.plain(pydoc.render_doc(AsyncRolloutClient))
    assert "async commit_weights(self, prepared: 'WeightsPrepared', *, mode: 'Mode' = 'drain'" in text
    assert "-> 'WeightsCommitted'" in text
    assert "Make prepared weights serve." in text


def test_to_its_own_kind_a_call_is_the_procedure() -> None:
    assert inspect.isgeneratorfunction(WeightCalls.prepare_weights)

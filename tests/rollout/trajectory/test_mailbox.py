"""Answers that come too late: a trainer cannot know that nobody waits any more."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from protocols.errors import PrefixMismatch, UnknownTrajectory
from protocols.fields import Turn
from protocols.replies import TurnDone
from protocols.requests import Continue
from rollout.environments.base import TurnResult
from rollout.trajectory.mailbox import Mailbox
from tests.rollout.workers import on_loop, soon

ANSWER = Continue(id="c", trajectory_id="t", turn=0, expected_len=5, done=True)


def question() -> TurnResult:
    turn = Turn(index=0, start=3, length=2, finish_reason="length")
    return TurnResult(turn, np.array([3, 4], np.int32), np.zeros(2, np.float32), 5)


async def asked() -> tuple[Mailbox, asyncio.Task[Continue]]:
    seen: list[TurnDone] = []
    mailbox = Mailbox("t", 10, seen.append)
    waiting = asyncio.ensure_future(mailbox.ask(question()))
    await soon(lambda: bool(seen))
    return mailbox, waiting


@on_loop
async def test_an_answer_that_is_waited_for_is_taken_and_so_is_its_repeat() -> None:
    mailbox, waiting = await asked()
    assert mailbox.answer(ANSWER)
    assert mailbox.answer(ANSWER)
    assert (await waiting).done


@pytest.mark.parametrize("ticks", [0, 1, 5])
@pytest.mark.parametrize("closed", [False, True])
def test_an_answer_after_the_question_was_given_up_is_late_and_no_fault(ticks: int, closed: bool) -> None:
    @on_loop
    async def test() -> None:
        mailbox, waiting = await asked()
        waiting.cancel()
        for _ in range(ticks):
            await asyncio.sleep(0)
        if closed and ticks:
            mailbox.close()
        if ticks or mailbox._answer is None or mailbox._answer.cancelled():
            assert not mailbox.answer(ANSWER)
        with suppress(asyncio.CancelledError):
            await waiting
        assert not mailbox.answer(ANSWER)
        with pytest.raises((PrefixMismatch, UnknownTrajectory)):
            mailbox.answer(ANSWER.model_copy(update={"turn": 1}))

    test()

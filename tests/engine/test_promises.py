"""Whoever asks is answered once: by the engine, or by its death."""

from __future__ import annotations

from engine.handle import Committed, CommitWeights, Pause, Prepared, PrepareWeights, Report, Submit, WeightsFailed
from engine.promises import Promises
from engine.request import Failure, refusal
from engine.step import WeightsInfo
from tests.engine.host import ask

DEAD = Failure("engine_dead", "it is gone")
OTHER = Failure("weights_invalid", "no")
INFO = WeightsInfo(7, "digest", 8, 0.0)


def test_what_was_not_answered_fails_and_then_nothing_is_left() -> None:
    promises = Promises()
    promises.make(Submit((ask("a"), ask("b", logprob_modes=("raw", "processed")))))
    promises.make(Submit((ask("c"),)))
    promises.make(Pause())
    promises.keep(Report((refusal(ask("a"), OTHER),)))
    completions, weights = promises.fail(DEAD)
    assert [completion.request_id for completion in completions] == ["b", "c"]
    assert all((completion.finish_reason, completion.error) == ("error", DEAD) for completion in completions)
    assert list(completions[0].logprobs) == ["raw", "processed"]
    assert weights == ()
    assert promises.fail(DEAD) == ((), ())


def test_an_id_that_was_sent_twice_ends_twice() -> None:
    promises = Promises()
    promises.make(Submit((ask("a"), ask("a"))))
    promises.keep(Report((refusal(ask("a"), OTHER),)))
    assert len(promises.fail(DEAD)[0]) == 1
    promises.make(Submit((ask("a"), ask("a"))))
    promises.keep(Report((refusal(ask("a"), OTHER), refusal(ask("a"), OTHER))))
    assert promises.fail(DEAD) == ((), ())


def test_each_step_of_an_update_is_promised_apart() -> None:
    promises = Promises()
    promises.make(PrepareWeights("u", "path", 7))
    promises.make(PrepareWeights("u", "path", 7))
    promises.make(PrepareWeights("v", "path", 7))
    promises.keep(Report(weights=(WeightsFailed("v", OTHER),)))
    promises.make(CommitWeights("u"))
    promises.keep(Report(weights=(Prepared("u", INFO),)))
    assert promises.fail(DEAD)[1] == (WeightsFailed("u", DEAD),)
    promises.make(CommitWeights("u"))
    promises.keep(Report(weights=(Committed("u", INFO, 0.0),)))
    promises.make(CommitWeights("w"))
    promises.keep(Report(weights=(WeightsFailed("w", OTHER),)))
    assert promises.fail(DEAD) == ((), ())


def test_an_answer_that_nobody_waits_for_does_no_harm() -> None:
    promises = Promises()
    promises.keep(Report((refusal(ask("a"), OTHER),), (Prepared("u", INFO), WeightsFailed("v", OTHER))))
    assert promises.fail(DEAD) == ((), ())

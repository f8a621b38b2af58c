"""Commands and reports through a pipe: as they were, in order, until the other end is gone."""

from __future__ import annotations

import dataclasses
from queue import SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from engine.errors import EngineError, OutOfMemory
from engine.handle import Report, Submit
from engine.handles.pipe import Pipe, taken
from engine.request import Completion, Request, SamplingParams, StopRule, Times


def through(*batch: Any) -> list[Any]:
    here, there = Pipe.pair()
    sender = Thread(target=lambda: (here.send(list(batch)), here.close()))
    sender.start()
    received = list(there.receive())
    sender.join()
    there.close()
    return received


def test_a_request_and_a_completion_arrive_as_they_were() -> None:
    biased = SamplingParams(logit_bias=MappingProxyType({3: -1.0}), allowed_ids=(1, 2))
    # More than a pipe holds.
    request = Request("r", np.arange(10**6, dtype=np.int32), 5, biased, StopRule(frozenset({7}), (b"\n",)))
    logprobs = {"raw": np.array([-1.5, -np.inf], np.float32)}
    submit, report = through(Submit((request,)), Report((Completion("r", "stop", request.token_ids[:2], logprobs),)))
    (found,), (ended,) = submit.requests, report.completions
    np.testing.assert_array_equal(found.token_ids, request.token_ids)
    assert found.token_ids.dtype == np.int32
    assert (found.params, found.stop) == (request.params, request.stop)
    with pytest.raises(TypeError):
        found.params.logit_bias[3] = 0.0
    np.testing.assert_array_equal(ended.logprobs["raw"], logprobs["raw"])
    ended.token_ids[0] = 5


@pytest.mark.parametrize("kind", [Request, SamplingParams, StopRule, Completion, Times])
def test_every_field_arrives_in_its_place(kind: type[Any]) -> None:
    named = {field.name: field.name for field in dataclasses.fields(kind)}
    (found,) = through(kind(**named))
    assert type(found) is kind
    assert dataclasses.asdict(found) == named


def test_an_error_keeps_its_kind_and_field() -> None:
    (error,) = through(OutOfMemory("no room", field="kv pool"))
    assert type(error) is OutOfMemory
    assert (str(error), error.message, error.code, error.field) == ("no room", "no room", "out_of_memory", "kv pool")
    assert isinstance(error, EngineError)


def test_the_other_end_gone_ends_what_is_received_and_refuses_what_is_sent() -> None:
    here, there = Pipe.pair()
    here.send([1, 2])
    here.close()
    assert list(there.receive()) == [1, 2]
    with pytest.raises(OSError):
        there.send([3])
    there.close()


def test_what_cannot_be_sent_sends_nothing() -> None:
    here, there = Pipe.pair()
    with pytest.raises(Exception, match="pickle"):
        here.send([1, lambda: None])
    here.send([2])
    here.close()
    assert list(there.receive()) == [2]
    there.close()


def test_taken_waits_for_one_and_takes_all() -> None:
    queue: SimpleQueue[int] = SimpleQueue()
    got: list[list[int]] = []
    reader = Thread(target=lambda: got.append(taken(queue)))
    reader.start()
    queue.put(1)
    reader.join()
    for i in range(3):
        queue.put(i)
    assert got == [[1]]
    assert taken(queue) == [0, 1, 2]

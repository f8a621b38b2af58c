"""Replies and events."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from protocols import Chunk, TurnDone, WeightsProgress, WorkerStatus, bad_request, is_event
from protocols.codec import REPLIES
from tests.protocols import samples
from tests.protocols.samples import floats, ids


def test_all_replies_of_the_design_exist() -> None:
    replies = [
        "welcome",
        "accepted",
        "weights_prepared",
        "weights_committed",
        "ok",
        "scored",
        "worker_status",
        "pong",
        "error",
    ]
    events = ["turn_done", "trajectory_done", "group_done", "batch_done", "weights_progress", "chunk"]
    assert set(REPLIES) == {*replies, *events}
    assert {kind for kind, message in samples.REPLIES.items() if is_event(message)} == set(events)


@pytest.mark.parametrize("field", ["token_ids", "logprobs"])
def test_a_turn_brings_its_tokens(field: str) -> None:
    whole = samples.REPLIES["turn_done"]
    assert isinstance(whole, TurnDone)
    short = {"token_ids": ids(1), "logprobs": floats(-1)}[field]
    with pytest.raises(ValidationError) as caught:
        TurnDone(**{**whole.__dict__, field: short})
    assert bad_request(caught.value).field == field


def test_a_turn_without_a_number_is_not_sent() -> None:
    whole = samples.REPLIES["turn_done"]
    with pytest.raises(ValidationError, match="must be finite"):
        TurnDone(**{**whole.__dict__, "logprobs": floats(-1, float("nan"))})


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_progress_is_a_share(fraction: float) -> None:
    with pytest.raises(ValidationError):
        WeightsProgress(id="1", update_id="u", stage="reading", fraction=fraction)


def test_a_chunk_holds_something() -> None:
    with pytest.raises(ValidationError):
        Chunk(id="1", of=0, offset=0, data=())


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        ({}, "3 running, 9 waiting, 2 to acknowledge"),
        ({"waiting_for_weights": 4.0, "wanted_version": 7.0}, "9 waiting (4 for weights 7 or later), 2 to acknowledge"),
    ],
)
def test_a_status_says_in_a_line_what_is_waited_for(wire: dict[str, float], says: str) -> None:
    status = WorkerStatus(
        id="1",
        state="ready",
        boot_id="b",
        uptime_s=61.4,
        weight_version=6,
        weight_digest="d",
        trajectories_running=3,
        trajectories_waiting=9,
        results_unacknowledged=2,
        sessions=1,
        wire=wire,
    )
    assert str(status).startswith("WorkerStatus(ready, weights 6, 3 running")
    assert says in str(status)
    assert str(status).endswith("1 session(s), up 61 s)")

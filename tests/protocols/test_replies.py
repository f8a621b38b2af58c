"""Replies and events."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from protocols import Chunk, TurnDone, WeightsProgress, bad_request, is_event
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

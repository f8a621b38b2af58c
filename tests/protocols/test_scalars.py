"""The words of the wire."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from protocols import SOURCE_GLUE, SOURCE_OBSERVATION, SOURCE_PREFIX, SOURCE_PROMPT, SOURCE_SAMPLED, STATUS_OF
from protocols.scalars import Status, TrajectoryReason


def test_every_reason_has_one_status() -> None:
    assert set(STATUS_OF) == set(get_args(TrajectoryReason))
    assert set(STATUS_OF.values()) == set(get_args(Status))
    assert Counter(STATUS_OF.values()) == {"truncated": 5, "aborted": 5, "completed": 3, "failed": 3}


def test_what_kind_of_end_is_told_by_its_name() -> None:
    for reason, status in STATUS_OF.items():
        assert (status == "aborted") == reason.startswith("abort_")
        assert (status == "failed") == reason.endswith("error")


def test_sources_keep_their_numbers() -> None:
    assert (SOURCE_PROMPT, SOURCE_SAMPLED, SOURCE_GLUE, SOURCE_OBSERVATION, SOURCE_PREFIX) == (0, 1, 2, 3, 4)

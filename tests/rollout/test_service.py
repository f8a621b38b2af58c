from __future__ import annotations

import numpy as np

from tests.rollout.raw_client import RawClient, group
from tests.rollout.timed_engine import reply_ids, reply_logprobs
from tests.rollout.workers import worker


def test_one_turn_there_and_back() -> None:
    with worker() as served, RawClient(served.address) as client:
        welcome = client.hello()
        assert welcome["type"] == "welcome"
        accepted = client.call("submit", batch_id="b", groups=[group(prompt=[5, 6, 7], max_tokens=4)])
        assert (accepted["type"], accepted["trajectories"], accepted["known"]) == ("accepted", 1, 0)
        record = client.record()
        segment = record["segments"][0]
        assert record["status"] == "truncated"
        np.testing.assert_array_equal(segment["token_ids"], [5, 6, 7, *reply_ids(3, 4)])
        np.testing.assert_array_equal(segment["logprobs"], np.r_[np.zeros(3), reply_logprobs(4)].astype(np.float32))
        np.testing.assert_array_equal(segment["loss_mask"], [0, 0, 0, 1, 1, 1, 1])
        assert client.event("group_done")["complete"]
        assert client.event("batch_done")["counts"] == {"truncated": 1}

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from protocols.errors import WeightsInvalid
from rollout.client import RolloutClient
from rollout.integrations.trl import WorkerWeights
from tests.rollout.workers import worker


def test_in_the_order_in_which_trl_calls(tmp_path: Path) -> None:
    with worker() as served, RolloutClient(served.address, timeout=10.0) as client:
        client.update_weights("/w/5", 5)  # another run was here before
        weights = WorkerWeights(client, directory=tmp_path)
        weights.init_weight_transfer()
        for version in (6, 7):
            weights.pause()
            weights.send_weights(iter([("model.norm.weight", torch.ones(4))]))
            weights.resume()
            assert client.status().weight_version == version
            (path,) = tmp_path.glob("*/*")
            assert client.status().weight_digest == f"stub:{path}"
        with pytest.raises(WeightsInvalid):
            weights.send_weights(iter([("model.norm.weight", torch.ones(4, dtype=torch.int32))]))
        assert client.status().weight_version == 7
        weights.destroy()
        client.ping()
    assert list(tmp_path.iterdir()) == []

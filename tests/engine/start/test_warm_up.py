from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.runner.torch_runner import Limits
from engine.start.progress import WARMING
from engine.start.warm_up import FEW_TOKENS, largest_steps, warm_up
from tests.engine.plans import LIMITS, load_device, runner_on
from tests.engine.serve import ask, ids, load, serve
from tests.rigs import write_rand


@pytest.mark.parametrize(
    ("limits", "max_context"),
    [(Limits(8, 704, 44), 704), (Limits(1, 16, 64), 1024), (Limits(64, 64, 8), 128), (Limits(512, 16384, 128), 2048)],
)
def test_the_steps_reach_every_limit_and_pass_none(limits: Limits, max_context: int) -> None:
    plans = list(largest_steps(limits, max_context))
    for plan in plans:
        assert plan.num_rows <= limits.max_rows
        assert plan.num_tokens == plan.query_lens.sum() <= limits.max_tokens
        assert (plan.context_lens + plan.query_lens <= max_context).all()
        assert np.diff(plan.block_indptr).max() <= limits.max_row_blocks
        assert not plan.block_ids.any()
    few = {plan.num_tokens for plan in plans if plan.num_rows == 1}
    assert few >= {count for count in FEW_TOKENS if count <= min(limits.max_tokens, max_context - 1)}
    rows = min(limits.max_rows, limits.max_tokens)
    assert max(plan.num_rows for plan in plans) == rows
    assert max((plan.context_lens + plan.query_lens).max() for plan in plans) == max_context - 1
    assert max(plan.num_tokens for plan in plans) >= min(limits.max_tokens - rows, max_context - 1)


def test_a_runner_takes_them_and_only_the_dummy_block_is_written(tmp_path: Path) -> None:
    device = load_device(write_rand(tmp_path))
    device.kv.data[:, :, 0] = 0.0
    told = []
    warm_up(runner_on(device), LIMITS, 704, lambda *what: told.append(what))
    assert told == [(WARMING, done, 9) for done in range(1, 10)]
    assert device.kv.data[:, :, 1:].isnan().all()
    assert device.kv.data[:, :, 0].any()


def test_an_engine_that_was_warmed_up_serves_what_a_cold_one_serves(tmp_path: Path) -> None:
    path = write_rand(tmp_path)
    requests = [ask(str(i), ids(i, 30 + i), 12) for i in range(5)]
    cold, warm = load(path), load(path)
    warm_up(warm.engine._runner, Limits(8, 64, 16), 256, lambda *_: None)
    for expected, found in zip(serve(cold, *requests).values(), serve(warm, *requests).values(), strict=True):
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.array_equal(found.logprobs["processed"], expected.logprobs["processed"])
    assert torch.isfinite(warm.kv.data[:, :, 1]).all()

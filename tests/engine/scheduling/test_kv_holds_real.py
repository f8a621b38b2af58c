"""KV held across tool calls, on the real engine: the tokens are scored as they are without a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.config import BLOCK_SIZE
from tests.engine.real import Real, ask, prompt, whole
from tests.rigs import RandModel, write_rand

TURNS = 4


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("random") / "model", RandModel(seed=6))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_logprobs_over_held_kv_are_those_without_a_cache(random: Path, overlap: bool) -> None:
    """Three trajectories take their turns while strangers pass through a pool that is not much larger than they."""
    engine = Real(random, num_blocks=50, overlap=overlap, max_step_tokens=48)
    ids = {f"{t}": prompt(10 + t, 45 + 7 * t) for t in range(3)}
    sampled: dict[str, list[tuple[int, np.ndarray]]] = {name: [] for name in ids}
    old = hits = 0
    for number in range(TURNS):
        requests = [
            ask(
                f"{name}.{number}",
                ids[name],
                17 + number,
                temperature=1.0,
                seed=5,
                sample_index=int(name),
                order=int(name),
                trajectory=name,
                goes_on=number + 1 < TURNS,
            )
            for name in ids
        ]
        for request, completion in zip(requests, engine.run(*requests), strict=True):
            name = request.trajectory
            whole(completion, 17 + number)
            sampled[name].append((len(ids[name]), completion.logprobs["processed"]))
            hits += completion.cached_tokens // BLOCK_SIZE
            ids[name] += completion.token_ids.tolist()
            if number + 1 < TURNS:
                old += (len(ids[name]) - 1) // BLOCK_SIZE
            ids[name] += prompt(100 * number + int(name), 9)
        for stranger in range(4):
            engine.run(ask(f"stranger {number} {stranger}", prompt(500 + 9 * number + stranger, 120), 3, order=99))
    assert hits >= 0.99 * old
    assert engine.engine.stats().kv_holds_dropped_total == 0
    engine.check_idle()

    cold = Real(random, prefix_cache=False)
    for name, turns in sampled.items():
        (scored,) = cold.run(ask(name, ids[name], 0, prompt_logprobs=True, temperature=1.0))
        assert scored.prompt_logprobs is not None
        for start, logprobs in turns:
            expected = scored.prompt_logprobs["processed"][start : start + len(logprobs)]
            np.testing.assert_allclose(logprobs, expected, atol=1e-4)

"""Whatever is asked of an engine that is ready, no kernel is compiled for it: that would stop every row for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from triton import knobs

from engine.config import EngineConfig
from engine.kernels import gate_up, tma_decode
from engine.request import SamplingParams
from engine.start.build import load_engine
from tests.engine.serve import ask, ids
from tests.rigs import RandModel, write_rand

LAWS = (
    SamplingParams(seed=1),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2),
    SamplingParams(top_k=20, seed=3),
    SamplingParams(repetition_penalty=1.1, min_p=0.05, seed=4),
    SamplingParams(logit_bias={5: 1.0}, seed=5),
)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels that Triton compiles or reads from its cache on disk, from here on."""
    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **of: names.append(of["fn"].name)
    yield names
    knobs.runtime.jit_post_compile_hook = before


@pytest.mark.parametrize("max_running", [1, 8, 80])
def test_a_ready_engine_has_compiled_every_kernel(tmp_path: Path, compiled: list[str], max_running: int) -> None:
    # No other test has these heads, so that some kernels are compiled here whatever ran before in this process.
    shape = {"hidden": 256, "heads": 6, "kv_heads": 2, "head_dim": 128, "intermediate": 512, "dtype": torch.bfloat16}
    path = write_rand(tmp_path, RandModel("qwen3", std=0.1, **shape))
    config = EngineConfig(max_running=max_running, max_step_tokens=512, max_context=1024)
    engine = load_engine(path, config, dtype="bfloat16", device="cuda").engine
    assert compiled or max_running > 1  # they stay compiled for the process
    ready, loaded = len(compiled), [module.kernel.cache_info().misses for module in (gate_up, tma_decode)]
    chance = random.Random(0)
    number = 0
    for few in (1, 2, 70):
        for _ in range(40):
            while len(engine.live_requests()) < few and chance.random() < 0.9:
                law, group = chance.choice(LAWS), f"g{number // 8}" if number // 8 % 2 else ""
                prompt = ids(number // 8, 64) if group else ids(number, chance.choice([1, 2, 15, 16, 17, 100, 700]))
                extra = {"top_logprobs": 2} if number % 11 == 0 else {}
                extra |= {"prompt_logprobs": True} if number % 13 == 0 else {}
                engine.add(ask(f"r{number}", prompt, chance.randint(1, 40), group=group, params=law, **extra))
                number += 1
            engine.step()
        while engine.has_work:
            engine.step()
    assert compiled[ready:] == []
    assert [module.kernel.cache_info().misses for module in (gate_up, tma_decode)] == loaded

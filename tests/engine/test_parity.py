"""The engine against the transformers library: full uncached forwards in float32 on random models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.request import SamplingParams
from tests.engine.serve import ask, assert_equal, check_greedy, ids, load, serve
from tests.rigs import RandModel, Reference, write_rand

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "qwen3": RandModel("qwen3", std=0.3),
    "qwen3-tied": RandModel("qwen3", std=0.3, tied=True, seed=1),
    "qwen2": RandModel("qwen2", std=0.3),
    "llama": RandModel("llama", std=0.3),
    "llama3-rope": RandModel("llama", std=0.3, rope_scaling=LLAMA3, rope_theta=10_000.0),
}


@pytest.fixture(scope="module", params=list(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = write_rand(tmp_path_factory.mktemp("parity") / request.param, MODELS[request.param])
    return path, Reference(path)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    path = write_rand(tmp_path_factory.mktemp("parity") / "rand")
    return path, Reference(path)


def test_sixteen_mixed_prompts_with_chunks_prefix_hits_and_preemption(
    checkpoint: tuple[Path, Reference], lazy: bool
) -> None:
    path, reference = checkpoint
    shared = ids(100, 48)
    prompts = [ids(n, n) for n in (1, 2, 15, 16, 17, 31, 64, 100)]
    prompts += [np.concatenate((shared, ids(200 + n, n))) for n in (1, 5, 16, 17, 30, 40, 60, 3)]
    loaded = load(path, max_running=6, max_step_tokens=40, num_blocks=36, lazy=lazy)
    requests = [ask(str(i), prompt, 64) for i, prompt in enumerate(prompts)]
    ended = serve(loaded, *requests)
    for request in requests:
        completion = ended[request.id]
        assert completion.finish_reason == "length"
        assert len(completion.token_ids) == 64
        check_greedy(completion, request.token_ids, reference)
    stats = loaded.engine.stats()
    assert stats.preemptions_total > 0
    assert sum(completion.cached_tokens for completion in ended.values()) >= 48
    assert stats.steps_total > 64, "the prompts of 40 and more were not cut into chunks"


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 48])
def test_a_prompt_that_is_cached_to_its_end_is_the_cold_run_again(
    qwen3: tuple[Path, Reference], length: int, lazy: bool
) -> None:
    path, reference = qwen3
    loaded, prompt = load(path, lazy=lazy), ids(length, length)
    cold = serve(loaded, ask("cold", prompt))["cold"]
    check_greedy(cold, prompt, reference)
    for name in ("second", "third"):
        again = serve(loaded, ask(name, prompt))[name]
        assert again.cached_tokens == (length - 1) // 16 * 16
        assert_equal(again, cold, 1e-4)


def test_two_equal_whole_block_prompts_in_one_step(qwen3: tuple[Path, Reference], lazy: bool) -> None:
    path, reference = qwen3
    prompt = ids(5, 32)
    for completion in serve(load(path, lazy=lazy), ask("a", prompt), ask("b", prompt)).values():
        check_greedy(completion, prompt, reference)


@pytest.mark.parametrize("reply", [1, 14, 15, 16, 17, 18])
def test_a_turn_over_prompt_and_reply_hits_only_blocks_that_are_whole(
    qwen3: tuple[Path, Reference], reply: int, lazy: bool
) -> None:
    """The last sampled token has no KV yet: a reply that ends a block must not publish it."""
    path, reference = qwen3
    loaded, prompt = load(path, lazy=lazy), ids(7, 31)
    first = serve(loaded, ask("first", prompt, reply))["first"]
    whole = np.concatenate((prompt, first.token_ids))
    turn = serve(loaded, ask("turn", whole))["turn"]
    assert turn.cached_tokens == (len(whole) - 1) // 16 * 16
    check_greedy(turn, whole, reference)


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=11)], ids=["greedy", "seeded"])
def test_two_requests_that_do_not_fit_together(
    qwen3: tuple[Path, Reference], params: SamplingParams, lazy: bool
) -> None:
    path, _ = qwen3
    requests = [ask(str(i), ids(40 + i, 16), 96, params=params) for i in range(2)]
    loaded = load(path, num_blocks=11, lazy=lazy)
    ended = serve(loaded, *requests)
    assert loaded.engine.stats().preemptions_total > 0
    for request in requests:
        alone = serve(load(path), request)[request.id]
        assert len(ended[request.id].token_ids) == len(ended[request.id].logprobs["processed"]) == 96
        assert_equal(ended[request.id], alone, 1e-4)


@pytest.mark.parametrize(
    ("model", "head_dim"),
    [(RandModel(head_dim=32), 32), (RandModel(head_dim=8), 8), (RandModel("llama", head_dim=None), 16)],
    ids=["wider", "narrower", "missing"],
)
def test_head_dim_is_the_configs_own_or_hidden_over_heads(tmp_path: Path, model: RandModel, head_dim: int) -> None:
    path = write_rand(tmp_path / "m", model)
    loaded, prompt = load(path, num_blocks=80), ids(3, 20)
    assert loaded.model_config.head_dim == head_dim
    assert loaded.kv.data.nbytes == 80 * 16 * (2 * model.layers * model.kv_heads * head_dim * 4)
    check_greedy(serve(loaded, ask("a", prompt, 20))["a"], prompt, Reference(path))


def test_a_thousand_decode_steps_write_nothing_but_kv(qwen3: tuple[Path, Reference]) -> None:
    loaded = load(qwen3[0], max_context=1040, num_blocks=80)
    before = loaded.weights.arena.flat.clone()
    serve(loaded, ask("long", ids(3, 20), 1000))
    assert loaded.weights.arena.flat.equal(before)
    assert loaded.kv.data[:, :, 0].isnan().all(), "the dummy block was written"


def test_prompt_logprobs_are_the_references_in_chunks_and_after_a_hit(
    qwen3: tuple[Path, Reference], lazy: bool
) -> None:
    path, reference = qwen3
    loaded, prompt = load(path, max_step_tokens=50, lazy=lazy), ids(9, 117)
    expected = reference.logprobs(prompt)
    other = np.concatenate((prompt[:112], ids(10, 9)))
    for name, asked in (("first", prompt), ("second", prompt), ("sharing", other)):
        found = serve(loaded, ask(name, asked, 2, prompt_logprobs=True))[name].prompt_logprobs
        assert found is not None
        assert len(found["processed"]) == len(asked)
        assert np.isnan(found["processed"][0])
        wanted = expected if name != "sharing" else reference.logprobs(other)
        np.testing.assert_allclose(found["processed"][1:], wanted[1:], rtol=0, atol=1e-4)


def test_bfloat16_follows_its_own_rounded_weights(tmp_path: Path) -> None:
    """Teacher-forced on the same ids, bf16 stays within a few of its roundings of the fp32 reference."""
    path = write_rand(tmp_path / "m", RandModel(std=0.1))
    loaded, prompt = load(path, dtype="bfloat16"), ids(12, 100)
    found = serve(loaded, ask("a", prompt, 1, prompt_logprobs=True))["a"].prompt_logprobs
    assert found is not None
    difference = np.abs(found["processed"][1:] - Reference(path).logprobs(prompt)[1:])
    assert loaded.weights.arena.flat.dtype == loaded.kv.data.dtype
    assert 1e-5 < difference.mean() < 0.05

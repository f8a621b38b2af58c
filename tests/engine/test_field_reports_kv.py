"""Field reports on KV blocks, prefix hits, preemption and shapes, on the real engine against transformers."""

import hashlib
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.memory.kv_size import kv_bytes_per_block
from engine.request import SamplingParams
from tests.engine.real import MODES, Real, ask, prompt, same, whole
from tests.engine.reference_law import log_softmax, reference
from tests.rigs import RandModel, Reference, write_rand


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("random") / "model", RandModel(seed=6))


@cache
def oracle(path: Path) -> Reference:
    return Reference(path)


def continued(path: Path, ids: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """Greedy ids and their logprobs from uncached forwards."""
    reply = oracle(path).greedy(ids, count)
    return reply, oracle(path).logprobs(ids + reply)[len(ids) :]


# --- 5: prompt logprobs and the prefix cache ---


def scores(path: Path, ids: list[int]) -> np.ndarray:
    return oracle(path).logprobs(ids)


@pytest.mark.parametrize("max_step_tokens", [256, 50, 16])
def test_report_5_prompt_logprobs_are_whole_on_a_prefix_hit(random: Path, max_step_tokens: int) -> None:
    engine = Real(random, max_step_tokens=max_step_tokens)
    first = prompt(1, 117)
    other = first[:112] + prompt(2, 9)
    warm = engine.run(ask("warm", first, 4, temperature=0))[0]
    for name, ids in (("first", first), ("again", first), ("shared", other), ("exact", first[:112])):
        (done,) = engine.run(ask(name, ids, 4, temperature=0, prompt_logprobs=True))
        assert done.prompt_logprobs is not None
        found = done.prompt_logprobs["processed"]
        assert len(found) == len(ids)
        assert np.isnan(found[0])
        np.testing.assert_allclose(found[1:], scores(random, ids)[1:], atol=1e-4)
        if ids == first:
            same(done, warm, atol=1e-5)
    # What was scored can be hit by others.
    assert engine.run(ask("hit", other, 1))[0].cached_tokens >= 112
    engine.check_idle()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_report_5_at_block_edges(random: Path, length: int) -> None:
    engine = Real(random)
    ids = prompt(length, length)
    for name in ("cold", "warm"):
        (done,) = engine.run(ask(name, ids, 1, prompt_logprobs=True, logprob_modes=MODES))
        assert done.prompt_logprobs is not None
        for mode in MODES:
            np.testing.assert_allclose(done.prompt_logprobs[mode], scores(random, ids), atol=1e-4)
    engine.check_idle()


def test_report_5_under_a_law_with_penalties_and_filters_in_chunks(random: Path) -> None:
    law: dict[str, Any] = {"temperature": 0.8, "top_p": 0.97, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    ids = (prompt(3, 20) * 3)[:50]
    sampled = np.arange(50) % 3 == 0
    engine = Real(random, max_step_tokens=16)
    (done,) = engine.run(ask("a", ids, 1, prompt_logprobs=True, logprob_modes=MODES, sampled=sampled, **law))
    assert done.prompt_logprobs is not None
    logits = oracle(random).logits(ids)
    compared = 0
    for at in range(1, 50):
        wanted = reference(logits[at - 1], SamplingParams(**law), ids[:at], sampled[:at].tolist())
        if wanted.margin < 1e-4:
            continue
        found = [done.prompt_logprobs[mode][at] for mode in MODES]
        np.testing.assert_allclose(found, wanted.modes[:, ids[at]], atol=1e-3)
        compared += 1
    assert compared > 40
    engine.check_idle()


# --- 20: prompts of whole blocks, fully cached ---


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_report_20_repeats_of_a_cached_prompt_equal_the_cold_run(random: Path, length: int) -> None:
    ids = prompt(length, length)
    reply, logprobs = continued(random, ids, 8)
    engine = Real(random)
    for repeat in range(3):
        (done,) = engine.run(ask(f"r{repeat}", ids, 8, temperature=0))
        assert whole(done).token_ids.tolist() == reply
        np.testing.assert_allclose(done.logprobs["processed"], logprobs, atol=1e-4)
        assert done.cached_tokens == (0 if repeat == 0 else (length - 1) // 16 * 16)
    engine.check_idle()


@pytest.mark.parametrize("length", [16, 32, 48])
def test_report_20_identical_prompts_in_one_step(random: Path, length: int) -> None:
    ids = prompt(40 + length, length)
    reply, _ = continued(random, ids, 8)
    engine = Real(random, max_step_tokens=256)
    for attempt in range(2):
        done = engine.run(*(ask(f"{attempt} {i}", ids, 8, temperature=0) for i in range(4)))
        for completion in done:
            assert whole(completion).token_ids.tolist() == reply
            assert completion.cached_tokens <= length - 1
    engine.check_idle()


@pytest.mark.parametrize("length", [14, 15, 16, 17, 24])
def test_report_20_a_prompt_that_equals_an_earlier_prompt_and_its_whole_reply(random: Path, length: int) -> None:
    """The last sampled token has no KV: replies end just before, at and just after a block's end."""
    ids = prompt(60 + length, length)
    engine = Real(random)
    for turn in range(3):
        reply, logprobs = continued(random, ids, 8)
        (done,) = engine.run(ask(f"turn {turn}", ids, 8, temperature=0))
        assert whole(done).token_ids.tolist() == reply
        np.testing.assert_allclose(done.logprobs["processed"], logprobs, atol=1e-4)
        assert done.cached_tokens == (0 if turn == 0 else (len(ids) - 1) // 16 * 16)
        ids = ids + reply
    engine.check_idle()


# --- 22: preempted, recomputed, unchanged ---


@pytest.mark.parametrize(
    ("law", "lazy"),
    [
        ({"temperature": 0}, False),
        ({"temperature": 1.0}, True),
        ({"top_p": 0.95, "frequency_penalty": 0.3, "repetition_penalty": 1.1}, False),
        ({"temperature": 0, "presence_penalty": 1.0}, True),
    ],
    ids=str,
)
def test_report_22_a_preempted_request_comes_back_whole(random: Path, law: dict[str, Any], lazy: bool) -> None:
    requests = [
        ask(f"r{i}", prompt(80 + i, 16), 96, seed=30 + i, logprob_modes=MODES, top_logprobs=2, **law) for i in range(2)
    ]
    alone = [Real(random).run(request)[0] for request in requests]
    engine = Real(random, num_blocks=11, lazy=lazy)
    done = engine.run(*requests)
    assert engine.engine.stats().preemptions_total >= 1
    assert sum(completion.preemptions for completion in done) >= 1
    for found, expected in zip(done, alone, strict=True):
        assert whole(found, 96).finish_reason == "length"
        same(found, expected)
        np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-4)
        assert found.top_ids is not None
        assert found.top_ids.shape == (96, 2)
        assert min(astuple(found.times)) >= 0
        assert (found.times.preempted > 0) == (found.preemptions > 0)
    engine.check_idle()


def test_report_22_preempted_while_its_prompt_is_scored(random: Path) -> None:
    scored = ask("scored", prompt(90, 40), 60, temperature=0, prompt_logprobs=True, order=1)
    others = [ask(f"o{i}", prompt(91 + i, 16), 96, temperature=0) for i in range(2)]
    engine = Real(random, num_blocks=13, max_step_tokens=16)
    *_, done = engine.run(*others, scored)
    assert engine.engine.stats().preemptions_total >= 1
    (alone,) = Real(random).run(scored)
    same(done, alone)
    assert done.prompt_logprobs is not None
    np.testing.assert_allclose(done.prompt_logprobs["processed"], scores(random, prompt(90, 40)), atol=1e-4)
    engine.check_idle()


# --- 27: exactly as many requests as slots, and more ---


@pytest.mark.parametrize("slots", [1, 3, 12])
@pytest.mark.parametrize("extra", [0, 1])
def test_report_27_every_slot_can_be_used_and_one_more_queues(random: Path, slots: int, extra: int) -> None:
    engine = Real(random, max_running=slots)
    requests = [ask(f"r{i}", prompt(100 + i, 3 + i), 4, temperature=0) for i in range(slots + extra)]
    widest = 0
    for request in requests:
        engine.engine.add(request)
    while engine.engine.has_work:
        engine.step()
        widest = max(widest, engine.engine.stats().running)
    assert widest == slots
    for request in requests:
        reply, _ = continued(random, request.token_ids.tolist(), 4)
        assert whole(engine.ended[request.id]).token_ids.tolist() == reply
    engine.check_idle()


# --- 28: head_dim is what the config says ---

SHAPES = {
    "head_dim above hidden / heads": RandModel(seed=7, head_dim=32),
    "head_dim left out": RandModel(seed=7, head_dim=None),
    "head_dim below hidden / heads": RandModel(seed=7, head_dim=8),
    "one KV head": RandModel(seed=7, kv_heads=1, head_dim=32),
    "as many KV heads": RandModel(seed=7, kv_heads=4, head_dim=32),
    "qwen2": RandModel("qwen2", seed=7, head_dim=None),
    "llama": RandModel("llama", seed=7, head_dim=None, tied=True),
    "llama with head_dim": RandModel("llama", seed=7, head_dim=32),
}


@pytest.mark.parametrize("name", SHAPES)
def test_report_28_prefill_and_decode_equal_the_reference(name: str, tmp_path: Path) -> None:
    model = SHAPES[name]
    head_dim = model.head_dim or model.hidden // model.heads
    path = write_rand(tmp_path / "model", model)
    engine = Real(path, max_step_tokens=16)
    ids = prompt(8, 20)
    (done,) = engine.run(ask("a", ids, 20, temperature=0, prompt_logprobs=True))
    reply = whole(done, 20).token_ids.tolist()
    # transformers takes 128 for a Qwen3 without head_dim: there it is told what we should find out.
    told = write_rand(tmp_path / "told", replace(model, head_dim=head_dim)) if model.head_dim is None else path
    wanted = Reference(told).logprobs(ids + reply)
    assert done.prompt_logprobs is not None
    np.testing.assert_allclose(done.prompt_logprobs["processed"], wanted[:20], atol=1e-4)
    np.testing.assert_allclose(done.logprobs["processed"], wanted[20:], atol=1e-4)
    assert engine.loaded.model_config.head_dim == head_dim
    assert kv_bytes_per_block(engine.loaded.model_config, 4) == 16 * 2 * model.layers * model.kv_heads * head_dim * 4
    engine.check_idle()


def test_report_28_decoding_writes_no_weight(tmp_path: Path) -> None:
    engine = Real(write_rand(tmp_path / "model", SHAPES["head_dim above hidden / heads"]))

    def checksum() -> str:
        return hashlib.sha256(engine.loaded.weights.arena.flat.numpy().tobytes()).hexdigest()

    before = checksum()
    engine.run(*(ask(f"r{i}", prompt(i, 10), 130, seed=i) for i in range(8)))
    assert engine.engine.stats().sampled_tokens_total == 8 * 130
    assert checksum() == before
    engine.check_idle()


# --- the results of a full step fit their buffers, whatever its rows ask for ---


def test_alternatives_at_their_limit_in_every_row(random: Path) -> None:
    engine = Real(random, max_running=4)
    done = engine.run(*(ask(f"r{i}", [1, 2, 3], 2, seed=i, top_logprobs=64) for i in range(4)))
    wanted = log_softmax(oracle(random).logits([1, 2, 3])[-1].astype(np.float64))
    for completion in done:
        assert whole(completion, 2).top_ids is not None
        assert completion.top_ids.shape == (2, 64)
        assert completion.top_ids[0].tolist() == np.argsort(-wanted, kind="stable")[:64].tolist()
        np.testing.assert_allclose(completion.top_logprobs[0], np.sort(wanted)[::-1][:64], atol=1e-4)
    with pytest.raises(RequestError) as refusal:
        engine.engine.add(ask("more", [1, 2, 3], 2, top_logprobs=65))
    assert refusal.value.field == "top_logprobs"
    engine.check_idle()

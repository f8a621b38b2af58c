"""The field reports that a GPU has to show too. Tests carry their reports' numbers."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.start.build import LoadedEngine, load_engine
from tests.engine.serve import ask, ids, serve, update
from tests.rigs import RandModel, write_rand, write_table

SHAPE = {"std": 0.1, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "intermediate": 512}


@pytest.fixture(scope="module")
def rand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("reports") / "rand", RandModel(**SHAPE, dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def peak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 on id 7, 39 on id 8, 0 elsewhere: whatever precedes, whatever the batch."""
    row = np.zeros((1, 512), np.float32)
    row[0, 7], row[0, 8] = 40, 39
    return write_table(tmp_path_factory.mktemp("reports") / "peak", row, hidden=256, head_dim=128)


def load(
    path: Path, *, decode_path: str = "graph", num_blocks: int | None = None, **config: int | bool
) -> LoadedEngine:
    options = EngineConfig(**{"max_running": 16, "max_step_tokens": 256, "max_context": 512} | config)
    return load_engine(path, options, dtype="bfloat16", device="cuda", num_blocks=num_blocks, decode_path=decode_path)


@pytest.mark.parametrize("decode_path", ["graph", "eager"])
@pytest.mark.parametrize("top_k", [0, 2])
def test_report_7_tiny_temperatures_beside_a_plain_row(peak: Path, decode_path: str, top_k: int) -> None:
    """With top_k the filtered path of the sampler, without it the plain one."""
    loaded = load(peak, decode_path=decode_path)
    neighbour = ask("plain", [1], 40, params=SamplingParams(seed=4))
    cold = {
        f"t{t}": ask(f"t{t}", [1], 40, params=SamplingParams(temperature=t, seed=3, top_k=top_k))
        for t in (0.0, 1e-38, 1e-6, 1e-5, 1e-4, 1e-3)
    }
    alone = serve(loaded, neighbour)["plain"]
    ended = serve(loaded, neighbour, *cold.values())
    for name in cold:
        assert (ended[name].token_ids == 7).all(), name
        # Greedy is scored by the plain softmax: -log(1 + e^-1), give or take bf16's logits.
        expected = -0.3133 if name == "t0.0" else 0.0
        np.testing.assert_allclose(ended[name].logprobs["processed"], expected, atol=1e-3)
    assert np.array_equal(ended["plain"].token_ids, alone.token_ids)
    np.testing.assert_allclose(ended["plain"].logprobs["processed"], alone.logprobs["processed"], atol=1e-5)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_report_20_a_prompt_of_whole_blocks_that_is_cached(rand: Path, length: int) -> None:
    loaded = load(rand)
    first, second, third = (serve(loaded, ask(name, ids(length, length), 8))[name] for name in "abc")
    for again in (second, third):
        assert again.cached_tokens == (length - 1) // 16 * 16
        assert np.array_equal(again.token_ids[:1], first.token_ids[:1])
        np.testing.assert_allclose(again.logprobs["processed"][:1], first.logprobs["processed"][:1], atol=5e-2)
    grown = np.concatenate((ids(length, length), third.token_ids))
    assert serve(loaded, ask("d", grown, 8))["d"].cached_tokens <= len(grown) - 1


def test_report_20_two_equal_prompts_in_one_step(rand: Path) -> None:
    ended = serve(load(rand), *(ask(name, ids(1, 32), 8, group="g") for name in "ab"))
    assert np.array_equal(ended["a"].token_ids[:1], ended["b"].token_ids[:1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_report_22_preempted_and_whole(peak: Path, temperature: float) -> None:
    """TABLE's tokens are those of the request alone, bit by bit."""
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in (5, 6)]
    requests = [ask(str(i), ids(i, 16), 96, params=law) for i, law in enumerate(params)]
    loaded = load(peak, num_blocks=11)
    ended = serve(loaded, *requests)
    assert loaded.engine.stats().preemptions_total > 0
    roomy = load(peak)
    for request in requests:
        alone = serve(roomy, request)[request.id]
        assert len(ended[request.id].token_ids) == 96
        assert np.array_equal(ended[request.id].token_ids, alone.token_ids)
        np.testing.assert_allclose(ended[request.id].logprobs["processed"], alone.logprobs["processed"], atol=1e-5)


@pytest.mark.parametrize("count", [9, 13, 17])  # in buckets of 10, 14 and 20
def test_report_25_a_padded_step_writes_nothing_but_its_rows(rand: Path, count: int) -> None:
    """All blocks of the pool belong to running rows, the last one too; what a step does not write stays."""
    loaded = load(rand, max_running=20, max_step_tokens=1024, num_blocks=1 + 4 * count, prefix_cache=False)
    for i in range(count):
        loaded.engine.add(ask(str(i), ids(i, 47), 16))
    table = loaded.engine._scheduler.table
    slots = range(count)
    while min(len(table.blocks_of(slot)) for slot in slots) < 4:
        loaded.engine.step()
    loaded.engine.drain()
    blocks = [table.blocks_of(slot) for slot in slots]
    bits = loaded.kv.data.view(torch.int16)  # bit by bit: NaN differs from itself
    assert sorted(block for row in blocks for block in row) == list(range(1, 1 + 4 * count))
    for _ in range(8):
        positions = table.computed[:count].tolist()
        before = bits.clone()
        loaded.engine.step()
        loaded.engine.drain()
        changed = (bits != before).flatten(4).any(-1).any(0).any(0)  # [blocks, 16]
        written = {(row[p // 16], p % 16) for row, p in zip(blocks, positions, strict=True)}
        assert {
            tuple(place) for place in changed[1:].nonzero().add(torch.tensor([1, 0], device="cuda")).tolist()
        } <= written
    assert loaded.engine.stats().padding_tokens_total > 0


@pytest.mark.parametrize("most", [1, 3, 12, 100])
def test_report_27_the_largest_batch_and_one_more(peak: Path, most: int) -> None:
    requests = [ask(str(i), [1 + i], 6, params=SamplingParams(seed=i)) for i in range(most + 1)]
    graph, eager = (serve(load(peak, max_running=most, decode_path=path), *requests) for path in ("graph", "eager"))
    for name, completion in graph.items():
        assert np.array_equal(completion.token_ids, eager[name].token_ids)


def test_report_51_a_float32_checkpoint_into_a_bf16_worker(rand: Path, tmp_path: Path) -> None:
    """Rounded to nearest even, by value; ten updates take no more memory."""
    model = RandModel(**SHAPE, dtype=torch.float32)
    source = write_rand(tmp_path / "float32", model)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors[name][0, :2] = torch.tensor([1.00390625, 1.01171875])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    loaded = load(rand)
    update(loaded, source, 1)
    gc.collect()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for version in range(2, 11):
        update(loaded, source, version)
    assert torch.cuda.mem_get_info()[0] == free
    found = loaded.weights.arena.parts[name]
    assert found.dtype == torch.bfloat16
    assert found[0, :2].tolist() == [1.0, 1.015625]
    assert torch.equal(found.cpu(), tensors[name].to(torch.bfloat16))

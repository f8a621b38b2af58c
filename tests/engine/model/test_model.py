"""The decoder as a function of weights, pool and input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.memory.memory import Memory
from engine.model.config import parse_model_config
from engine.model.model import forward, head
from engine.request import SamplingParams
from engine.runner.input import StepBuffer, StepInput
from engine.weights.update import Weights
from tests.engine.plans import CPU, LIMITS, Row, device_on, load_device, plan, start
from tests.engine.serve import ids
from tests.rigs import Architecture, RandModel, Reference, write_rand

FILTERED = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5)


def pack(*rows: Row) -> StepInput:
    return StepBuffer(LIMITS.max_rows, LIMITS.max_tokens, 400, Memory(CPU)).pack(plan(*rows))


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
def test_logits_of_every_position_are_transformers(tmp_path: Path, architecture: Architecture) -> None:
    path = write_rand(tmp_path / "m", RandModel(architecture, std=0.3))
    device, tokens = load_device(path), ids(1, 50)
    step = pack(Row(0, 0, [9, 3, 17, 4], tokens.tolist()))
    with torch.inference_mode():
        attention = device.attention.plan(step)
        residual = forward(device.model, step.token_ids, step.positions, step.write_slots, attention, device.kv)
        found = head(device.model, residual)
    expected = torch.from_numpy(Reference(path).logits(tokens.tolist()))
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_llama_with_biases_is_transformers(tmp_path: Path, bias: str) -> None:
    """transformers fills the biases that the checkpoint must then hold."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**RandModel("llama").config() | {bias: True}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    device, tokens = load_device(tmp_path), ids(1, 30)
    step = pack(Row(0, 0, [9, 3], tokens.tolist()))
    with torch.inference_mode():
        attention = device.attention.plan(step)
        residual = forward(device.model, step.token_ids, step.positions, step.write_slots, attention, device.kv)
        found = head(device.model, residual)
        expected = model(torch.from_numpy(tokens.astype("int64"))[None]).logits[0]
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-4)


def test_head_rows_are_gathered_before_the_final_norm(tmp_path: Path) -> None:
    device = load_device(write_rand(tmp_path / "m"))
    residual, rows = torch.randn(6, 64), torch.tensor([5, 0, 5])
    before = residual.clone()
    some = head(device.model, residual, rows)
    torch.testing.assert_close(some, head(device.model, residual)[rows])
    assert torch.equal(residual, before), "the residual is not used up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), FILTERED], ids=["greedy", "plain", "all"]
)
def test_a_step_on_the_meta_device_asks_for_no_value(dtype: torch.dtype, params: SamplingParams) -> None:
    """No `.item()`, boolean index, `nonzero` or growing tensor: on meta there is no value to ask for."""
    meta = Memory(torch.device("meta"))
    config = parse_model_config(RandModel().config())
    device = device_on(config, Weights(config, dtype, meta), meta)
    buffer = StepBuffer(LIMITS.max_rows, LIMITS.max_tokens, 400, meta)
    starts = [start(slot, [1, 2, 3], params, top_logprobs=2) for slot in range(3)]
    decode = plan(Row(0, 20, [3, 4]), Row(2, 5, [7]), starts=starts)
    mixed = plan(Row(0, 20, [3, 4]), Row(1, 16, [7, 5], [1, 2, 3]), Row(2, 0, [9], [4] * 9, samples=False))
    for asked, rows in ((decode, 2), (mixed, 2)):
        sampled = device.run(buffer.pack(asked)).sampled
        assert sampled is not None
        assert sampled.token_ids.device.type == "meta"
        assert sampled.token_ids.shape == (rows,)
        assert sampled.logprobs.shape == (3, rows)

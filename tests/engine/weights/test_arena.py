from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from engine.memory.memory import Memory
from engine.model.config import ModelConfig, parse_model_config
from engine.weights.arena import Arena, parameters
from tests.rigs import RandModel

CPU = torch.device("cpu")
BIASED = RandModel("llama").config() | {"attention_bias": True, "mlp_bias": True}
CONFIGS = {
    "qwen3": parse_model_config(RandModel("qwen3").config()),
    "qwen3-odd": parse_model_config(RandModel("qwen3", hidden=72, head_dim=6, intermediate=50, vocab=33).config()),
    "qwen2-tied": parse_model_config(RandModel("qwen2", tied=True).config()),
    "llama-biased": parse_model_config(BIASED),
}


def arena(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Arena:
    return Arena(config, dtype, Memory(CPU), "weights")


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return CONFIGS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_an_aligned_view_and_none_overlap(config: ModelConfig, dtype: torch.dtype) -> None:
    found = arena(config, dtype)
    spans = []
    for view in found.parameters.values():
        assert view.dtype == dtype
        assert view.is_contiguous()
        assert view.data_ptr() % 256 == 0
        spans.append((view.data_ptr(), view.data_ptr() + view.nbytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[0][0] == found.flat.data_ptr()
    assert spans[-1][1] <= found.flat.data_ptr() + found.flat.nbytes
    assert found.nbytes == sum(view.nbytes for view in found.parameters.values())


def test_parts_fill_their_parameters_exactly(config: ModelConfig) -> None:
    found = arena(config)
    for parameter in parameters(config):
        found.parameters[parameter.name].zero_()
        for name in parameter.parts:
            found.parts[name].add_(1.0)
        assert found.parameters[parameter.name].eq(1.0).all(), parameter.name


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_and_shapes_are_those_of_the_checkpoint(architecture: str, tied: bool) -> None:
    model = RandModel(architecture, tied=tied)  # type: ignore[arg-type]
    found = arena(parse_model_config(model.config())).parts
    assert {name: tuple(view.shape) for name, view in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in model.tensors().items()
    }


def test_fused_rows_are_q_k_v_and_gate_up() -> None:
    config = CONFIGS["llama-biased"]
    found = arena(config)
    name = "model.layers.1.self_attn"
    for value, part in enumerate(("q_proj", "k_proj", "v_proj")):
        found.parts[f"{name}.{part}.weight"].fill_(value)
        found.parts[f"{name}.{part}.bias"].fill_(value)
    rows = torch.tensor([0.0] * config.q_size + [1.0] * config.kv_size + [2.0] * config.kv_size)
    assert torch.equal(found.parameters["layers.1.qkv"], rows[:, None].expand(-1, config.hidden_size))
    assert torch.equal(found.parameters["layers.1.qkv_bias"], rows)
    found.parts["model.layers.1.mlp.gate_proj.weight"].fill_(3.0)
    found.parts["model.layers.1.mlp.up_proj.weight"].fill_(4.0)
    assert found.parameters["layers.1.gate_up"][:, 0].tolist() == [3.0] * 128 + [4.0] * 128


def test_a_tied_head_has_no_memory_of_its_own() -> None:
    assert "lm_head.weight" not in arena(CONFIGS["qwen2-tied"]).parts
    assert "head" not in arena(CONFIGS["qwen2-tied"]).parameters
    assert "lm_head.weight" in arena(CONFIGS["qwen3"]).parts


def test_two_arenas_of_one_config_have_one_layout(config: ModelConfig) -> None:
    first, second = arena(config), arena(config)
    for name, view in first.parts.items():
        assert view.storage_offset() - first.flat.storage_offset() == (
            second.parts[name].storage_offset() - second.flat.storage_offset()
        )

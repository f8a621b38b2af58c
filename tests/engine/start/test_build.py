"""From a path and options to an engine, or to a refusal that says what to change."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError, OutOfMemory, WeightsError, WeightsIncomplete, WeightsInvalid
from engine.memory.kv_size import kv_bytes_per_block
from engine.start.build import load_engine
from engine.start.recipe import EngineRecipe
from tests.engine.serve import ask, serve
from tests.rigs import RandModel, write_rand

CONFIG = EngineConfig(max_running=2, max_step_tokens=32, max_context=64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rand(tmp_path / "m", RandModel(eos=3), generation_config={"eos_token_id": [3, 4], "temperature": 0.6})


def test_the_pool_holds_every_slot_unless_told_otherwise(path: Path) -> None:
    assert load_engine(path, CONFIG).kv.num_blocks == 2 * 4 + 1
    assert load_engine(path, CONFIG, num_blocks=3).kv.num_blocks == 3
    loaded = load_engine(path, CONFIG, kv_bytes=100_000)
    assert loaded.kv.num_blocks == 100_000 // kv_bytes_per_block(loaded.model_config, 4)
    assert load_engine(path, CONFIG, kv_bytes=100_000, dtype="bfloat16").kv.num_blocks == 2 * loaded.kv.num_blocks


def test_what_the_owner_needs(path: Path) -> None:
    loaded = load_engine(str(path), CONFIG, weight_version=7)
    assert loaded.model_config.eos_ids == (3, 4)
    assert loaded.engine.weight_version == 7
    assert loaded.weights.digest.startswith("sha256:")
    taken = {tag for _, tag, _ in loaded.info.memory}
    assert taken >= {"weights", "weights staging", "kv pool", "step input", "step results"}
    assert {device for device, _, _ in loaded.info.rest} == {"cpu"}
    assert loaded.info.rest[-1][1] == "free"
    assert loaded.info.rest[-1][2] > 0
    assert len(serve(loaded, ask("a", [1, 2, 3], 5))["a"].token_ids) == 5


def test_a_recipe_says_how_long_imports_and_load_took(path: Path) -> None:
    started = time.monotonic()
    info = EngineRecipe({"path": path, "config": CONFIG, "weight_version": 7}).build().info
    took = time.monotonic() - started
    assert info.import_s >= 0
    assert info.load_s > 0
    assert info.import_s + info.load_s <= took
    assert (info.weight_version, info.gpu) == (7, "")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"num_blocks": 1}, "num_blocks"),
        ({"kv_bytes": 100}, "kv_bytes"),
        ({"config": EngineConfig(max_context=4097)}, "max_context"),
    ],
)
def test_options_that_cannot_be(path: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(EngineError) as caught:
        load_engine(path, **{"config": CONFIG} | options)
    assert caught.value.field == field
    if field in ("num_blocks", "kv_bytes"):
        assert isinstance(caught.value, OutOfMemory)


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, WeightsInvalid, "architectures"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, WeightsInvalid, "rope_scaling.rope_type"),
        ({"num_hidden_layers": 3}, WeightsIncomplete, "model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, WeightsInvalid, None),
        ({"tie_word_embeddings": True}, WeightsInvalid, "lm_head.weight"),
        ({"vocab_size": 513}, WeightsInvalid, None),
        ({"head_dim": 64}, WeightsInvalid, None),
    ],
)
def test_a_config_that_does_not_fit_the_weights(
    path: Path, change: dict[str, Any], kind: type[WeightsError], field: str | None
) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(kind) as caught:
        load_engine(path, CONFIG)
    if field is not None:
        assert caught.value.field == field


def test_a_path_with_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsIncomplete, match=r"config\.json"):
        load_engine(tmp_path / "nowhere", CONFIG)


def test_weights_and_kv_have_the_dtype_asked_for(path: Path) -> None:
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        loaded = load_engine(path, CONFIG, dtype=name)
        assert loaded.weights.arena.flat.dtype == loaded.kv.data.dtype == dtype

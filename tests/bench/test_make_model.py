from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from bench.make_model import SHAPES, main, make_model
from engine.config import EngineConfig
from engine.model.config import parse_model_config
from engine.start.build import load_engine
from tests.engine.real import ask


@pytest.mark.parametrize(
    ("shape", "layers", "heads", "tied"),
    [("qwen3-0.6b", 28, 16, True), ("qwen3-4b", 36, 32, True), ("qwen3-8b", 36, 32, False)],
)
def test_the_shapes_are_the_published_ones(shape: str, layers: int, heads: int, tied: bool) -> None:
    config = parse_model_config(SHAPES[shape])
    assert (config.num_layers, config.num_heads, config.tied) == (layers, heads, tied)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 128, 151936)
    assert config.qk_norm
    assert not config.qkv_bias


def test_a_checkpoint_in_shards_is_read_by_the_engine(tmp_path: Path) -> None:
    size = make_model("tiny", tmp_path, shard_bytes=100_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert size == sum(file.stat().st_size for file in files)
    loaded = load_engine(tmp_path, EngineConfig(max_running=2, max_step_tokens=32, max_context=64), dtype="bfloat16")
    loaded.engine.add(ask("one", [1, 2, 3], 4))
    ended = []
    while loaded.engine.has_work:
        ended += loaded.engine.step()
    assert [len(completion.token_ids) for completion in ended] == [4]


def test_weights_are_normal_and_norms_are_ones(tmp_path: Path) -> None:
    make_model("tiny", tmp_path, std=0.3)
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, "pt") as tensors:
        embedding = tensors.get_tensor("model.embed_tokens.weight")
        norm = tensors.get_tensor("model.layers.0.self_attn.q_norm.weight")
    assert embedding.dtype == torch.bfloat16
    assert embedding.float().std().item() == pytest.approx(0.3, rel=0.05)
    assert abs(embedding.float().mean().item()) < 0.01
    assert (norm == 1).all()


def test_a_seed_makes_the_same_checkpoint(tmp_path: Path) -> None:
    contents = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model("tiny", tmp_path / folder, seed=seed)
        contents.append([file.read_bytes() for file in sorted((tmp_path / folder).glob("*.safetensors"))])
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_the_command_says_what_it_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_model", "--shape", "tiny", "--out", str(tmp_path)])
    main()
    assert "tiny" in capsys.readouterr().out
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"

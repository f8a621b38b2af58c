"""GGUF to checkpoint directory, on a model small enough to know every value of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from examples.smollm2.convert import convert, hf_name, unpermute
from rollout.chat.tokenizer import Tokenizer
from tests.engine.serve import ask, check_greedy, load, serve
from tests.examples.gguf_files import CONTROL, MODEL, TOKENS, interleave, write_gguf
from tests.rigs import Reference


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    return convert(write_gguf(folder / "model.gguf"), folder / "checkpoint")


def test_every_tensor_comes_back_bit_for_bit_under_its_name(checkpoint: Path) -> None:
    found, expected = load_file(checkpoint / "model.safetensors"), MODEL.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], tensor.numpy(), err_msg=name)


def test_the_rows_of_q_and_k_are_put_back_per_head() -> None:
    rows = np.arange(2 * 6, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    moved = interleave(rows, 2)
    assert moved[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(unpermute(moved, 2), rows)


def test_the_config_says_what_the_file_said(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    expected = MODEL.config()
    for name in set(expected) - {"bos_token_id", "eos_token_id", "rope_scaling", "attention_bias"}:
        assert config[name] == expected[name], name
    assert (
        config["eos_token_id"] == json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == 2
    )


def test_a_head_of_its_own_makes_the_model_untied(tmp_path: Path) -> None:
    model = dataclasses.replace(MODEL, tied=False)
    path = convert(write_gguf(tmp_path / "model.gguf", model), tmp_path / "checkpoint")
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is False
    np.testing.assert_array_equal(
        load_file(path / "model.safetensors")["lm_head.weight"], model.tensors()["lm_head.weight"].numpy()
    )


def test_the_engine_and_transformers_read_the_result_alike(checkpoint: Path) -> None:
    prompt = [1, 40, 50, 60, 2, 70]
    check_greedy(serve(load(checkpoint), ask("a", prompt, 16))["a"], prompt, Reference(checkpoint))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0])
def test_quantised_blocks_are_scaled_back(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Within half a step of the quantisation, which a block's largest value bounds."""
    path = convert(write_gguf(tmp_path / "model.gguf", kind=kind), tmp_path / "checkpoint")
    steps = {GGMLQuantizationType.Q4_1: 15, GGMLQuantizationType.Q8_0: 254}[kind]
    found = load_file(path / "model.safetensors")
    for name, tensor in MODEL.tensors().items():
        values = tensor.numpy()
        if values.ndim == 1:
            np.testing.assert_array_equal(found[name], values)
            continue
        blocks = values.reshape(-1, 32)
        width = np.abs(blocks).max(1) * 2 if kind == GGMLQuantizationType.Q8_0 else np.ptp(blocks, axis=1)
        error = np.abs(found[name].reshape(-1, 32) - blocks).max(1)
        assert error.max() > 0
        assert (error <= width / steps * 0.55).all(), name


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hi", ["hi"]),
        (" hi and 12", ["Ġhi", "Ġand", "Ġ", "1", "2"]),
        ("user1212", ["user", "1", "2", "1", "2"]),
        ("<|im_end|>hi", ["<|im_end|>", "hi"]),
    ],
)
def test_digits_stand_alone_and_control_tokens_are_one(checkpoint: Path, text: str, pieces: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [TOKENS[i] for i in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_text_as_data_is_the_same_for_trainer_and_worker(checkpoint: Path) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(checkpoint), Tokenizer.load(checkpoint)
    assert ours is not None
    for text in ("say <|im_end|> and 12", "ünïcode 🙂\n\n", CONTROL[1]):
        ids = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ids == ours.encode(text).tolist()
        assert not set(ids) & set(range(len(CONTROL)))
        assert theirs.decode(ids) == text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"architecture": "qwen2"}, r"general\.architecture 'qwen2' is not supported, only 'llama'"),
        ({"pre": "qwen2"}, r"tokenizer\.ggml\.pre 'qwen2' is not supported, only 'smollm'"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(tmp_path: Path, options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        convert(write_gguf(tmp_path / "model.gguf", **options), tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "rope_freqs.weight", "blk.0.ffn_gate_inp"])
def test_a_tensor_of_another_model_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        hf_name(name)

"""config.json: what is taken, and what is refused by name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.errors import WeightsError, WeightsIncomplete, WeightsInvalid
from engine.model.config import Llama3Scaling, parse_model_config, read_model_config
from tests.rigs import RandModel

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALING = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def raw(architecture: Any = "qwen3", **changes: Any) -> dict[str, Any]:
    """The config of a RAND model; a change of ... takes the name away."""
    config = RandModel(architecture).config() | changes
    return {name: value for name, value in config.items() if value is not ...}


def refusal(**changes: Any) -> WeightsError:
    with pytest.raises(WeightsInvalid) as caught:
        parse_model_config(raw(**changes))
    assert str(caught.value.field) in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("architecture", "qk_norm", "qkv_bias"), [("qwen3", True, False), ("qwen2", False, True), ("llama", False, False)]
)
def test_the_three_architectures_are_flags(architecture: str, qk_norm: bool, qkv_bias: bool) -> None:
    config = parse_model_config(raw(architecture))
    assert (config.architecture, config.qk_norm, config.qkv_bias) == (architecture, qk_norm, qkv_bias)
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (64, 2, 4, 2)
    assert (config.head_dim, config.q_size, config.kv_size) == (32, 128, 64)
    assert not config.o_bias
    assert not config.mlp_bias
    assert not config.tied


def test_bias_flags() -> None:
    llama = parse_model_config(raw("llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = parse_model_config(raw("qwen3", attention_bias=True))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias) == (True, True, False)


def test_what_may_be_missing_has_a_meaning() -> None:
    names = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings")
    config = parse_model_config(raw(**dict.fromkeys(names, ...)))
    assert config.head_dim == 16
    assert config.num_kv_heads == 4
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling, config.tied) == (1e-6, 10_000.0, None, False)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
    ],
)
def test_what_must_be_there_is_named_when_it_is_not(name: str) -> None:
    assert refusal(**{name: ...}).field == name
    for value in (0, -1, "64", 64.0, True):
        assert refusal(**{name: value}).field == name


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {
            "rope_theta": ...,
            "rope_scaling": ...,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
        {"rope_theta": 5e5, "rope_scaling": ..., "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_every_spelling_of_llama3_scaling(rope: dict[str, Any]) -> None:
    config = parse_model_config(raw("llama", **rope))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == SCALING


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}, {}])
def test_every_spelling_of_no_scaling(scaling: Any) -> None:
    assert parse_model_config(raw(rope_scaling=scaling)).rope_scaling is None


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "longrope", "su", "mrope", None, 3])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_other_scalings_are_refused_by_name(name: str, kind: Any) -> None:
    other = {"rope_scaling": ...} if name == "rope_parameters" else {}
    error = refusal(**other | {name: {"rope_type": kind, "factor": 2.0}})
    assert error.field == f"{name}.rope_type"
    assert repr(kind) in str(error)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": "8"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "llama3"}}, "rope_scaling"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_scaling": ...}, "rope_parameters"),
        (
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_scaling.partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 33}, "head_dim"),
        ({"head_dim": ..., "hidden_size": 66}, "head_dim"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ],
)
def test_what_would_change_the_function_is_refused(changes: dict[str, Any], field: str) -> None:
    assert refusal(**changes).field == field


ODD = [
    *(None, True, False, 0, -1, 1, 2.5, float("nan"), float("inf"), 10**30, 10**400, "", "a", "1"),
    *([], [1], ["a"], [None], [{}, []], ["full_attention", 3], {}, {"a": {}}),
    *({"rope_type": []}, {"type": {}}, {"rope_type": "llama3", "factor": 10**400}, {"rope_theta": 10**400}),
]
OPTIONAL = ["mlp_bias", "layer_types", "sliding_window", "max_window_layers", "rope_parameters", "quantization_config"]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("name", [*RandModel().config(), *OPTIONAL, "partial_rotary_factor", "use_sliding_window"])
def test_whatever_stands_there_is_understood_or_refused_by_name(architecture: str, name: str) -> None:
    """Not by the error of the first operation that it does not bear, which would name nothing."""
    windowed = {"use_sliding_window": True, "max_window_layers": 0}
    for value in ODD:
        for others in ({}, windowed if name != "use_sliding_window" else {"max_window_layers": 0}):
            with contextlib.suppress(WeightsInvalid):
                parse_model_config(raw(architecture, **{**others, name: value}))
            with contextlib.suppress(WeightsInvalid):
                parse_model_config(raw(architecture), {"eos_token_id": value})


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"layer_types": ["full_attention", "full_attention"], "use_sliding_window": True, "max_window_layers": 0},
    ],
)
def test_a_window_that_is_not_in_use_is_no_window(changes: dict[str, Any]) -> None:
    assert parse_model_config(raw(**changes)) == parse_model_config(raw())


@pytest.mark.parametrize("named", [["Qwen3MoeForCausalLM"], ["Qwen3ForSequenceClassification"], ["GPT2LMHeadModel"]])
def test_an_unknown_architecture_is_named(named: list[str]) -> None:
    error = refusal(architectures=named)
    assert error.field == "architectures"
    assert named[0] in str(error)


def test_model_type_stands_in_for_missing_architectures() -> None:
    assert parse_model_config(raw("llama", architectures=...)).architecture == "llama"
    assert "mamba" in str(refusal(architectures=None, model_type="mamba"))
    assert refusal(architectures=["A", "B"]).field == "architectures"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (151, {"eos_token_id": [151, 149]}, (151, 149)),
        (151, {"eos_token_id": 149}, (149,)),
        (151, {"temperature": 0.6, "top_k": 20}, (151,)),
        (151, {"eos_token_id": None}, (151,)),
        (151, None, (151,)),
        ([151, 149, 151], None, (151, 149)),
        (None, None, ()),
        (151, {"eos_token_id": []}, ()),
    ],
)
def test_the_eos_list(config: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]) -> None:
    assert parse_model_config(raw(eos_token_id=config), generation).eos_ids == expected


@pytest.mark.parametrize("value", [512, -1, "2", [1, None], True, 1.5])
def test_eos_ids_are_ids(value: Any) -> None:
    assert refusal(eos_token_id=value).field == "eos_token_id"


def test_nothing_else_comes_from_generation_config() -> None:
    generation = {"temperature": 0.6, "top_k": 20, "vocab_size": 3, "max_length": 5, "bos_token_id": 1}
    assert parse_model_config(raw(), generation) == parse_model_config(raw())


def test_a_path_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    for path in (tmp_path / "absent", tmp_path / "model.safetensors"):
        with pytest.raises(WeightsIncomplete, match=f"{path}: there is no such directory"):
            read_model_config(path)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(WeightsIncomplete) as caught:
        read_model_config(tmp_path)
    assert caught.value.field == "config.json"
    (tmp_path / "config.json").write_text(json.dumps(raw(eos_token_id=7)))
    assert read_model_config(tmp_path).eos_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_model_config(tmp_path).eos_ids == (7, 8)
    for name in ("generation_config.json", "config.json"):
        for text in ("", '{"eos_token_id": ', "[]", "\udcff"):
            (tmp_path / name).write_text(text, errors="surrogateescape")
            with pytest.raises(WeightsInvalid) as broken:
                read_model_config(tmp_path)
            assert broken.value.field == name


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_read(tmp_path: Path, architecture: str, tied: bool) -> None:
    """Whatever spelling the installed version writes."""
    model = RandModel(architecture, tied=tied, rope_theta=20_000.0, eos=[5, 6])  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text(json.dumps(model.config()))
    ours = read_model_config(tmp_path)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
    assert read_model_config(tmp_path / "saved") == ours
    assert ours.rope_theta == 20_000.0


def test_differences_are_those_of_the_function() -> None:
    ours = parse_model_config(raw())
    assert ours.differences(dataclasses.replace(ours, eos_ids=(3,), max_positions=9)) == []
    assert ours.differences(dataclasses.replace(ours, rope_theta=3.0, tied=True)) == ["rope_theta", "tied"]

"""What config.json says about the function a checkpoint computes, checked once; and its EOS list.

Qwen3, Qwen2 and Llama are one decoder with flags: per-head q/k norm, biases, rope scaling. Whatever would change the
function and is not built here is refused by name, never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from sys import float_info
from typing import Any

from engine.errors import WeightsIncomplete, WeightsInvalid


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths divided by `factor`, short ones kept, a blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's shape and flags.

    qk_norm: RMS norm of each q and k head before rope. qkv_bias, o_bias, mlp_bias: which linears add a bias.
    tied: the head is the embedding itself. max_positions: the context the checkpoint was made for.
    eos_ids: in the order of the file, without repeats; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    tied: bool
    max_positions: int
    eos_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def differences(self, other: ModelConfig) -> list[str]:
        """Names of the fields in which `other` computes another function of the same weights."""
        harmless = {"eos_ids", "max_positions"}
        names = [field.name for field in fields(self) if field.name not in harmless]
        return [name for name in names if getattr(self, name) != getattr(other, name)]


ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}


def read_model_config(directory: Path) -> ModelConfig:
    """Read config.json and generation_config.json of a checkpoint directory.

    Raises `WeightsIncomplete` when the directory or config.json is missing, `WeightsInvalid` for anything that is not
    supported.
    """
    if not directory.is_dir():
        raise WeightsIncomplete(
            f"{directory}: there is no such directory; it must be a local one with config.json and safetensors files",
            field=directory.name,
        )
    path = directory / "config.json"
    raw = _read_json(path)
    if raw is None:
        raise WeightsIncomplete(f"{path}: there is no such file", field="config.json")
    return parse_model_config(raw, _read_json(directory / "generation_config.json"))


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """`raw` is config.json, `generation` generation_config.json, of which only the EOS list is taken."""
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    hidden, heads = _count(raw, "hidden_size"), _count(raw, "num_attention_heads")
    kv_heads = _count(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _invalid("num_key_value_heads", f"{heads} attention heads cannot share {kv_heads} KV heads evenly")
    if raw.get("head_dim") is None and hidden % heads:
        raise _invalid("head_dim", f"is missing, and hidden_size {hidden} does not divide by {heads} heads")
    head_dim = _count(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise _invalid("head_dim", f"must be even for rope, not {head_dim}")
    theta, scaling = _rope(raw)
    attention_bias = _flag(raw, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=_count(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=architecture == "qwen3",
        # Qwen2 always has q, k, v biases and never one on o_proj; its config has no flag for either.
        qkv_bias=architecture == "qwen2" or attention_bias,
        o_bias=architecture != "qwen2" and attention_bias,
        mlp_bias=architecture == "llama" and _flag(raw, "mlp_bias"),
        tied=_flag(raw, "tie_word_embeddings"),
        max_positions=_count(raw, "max_position_embeddings"),
        eos_ids=_eos_ids(raw, generation),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    named = raw.get("architectures") or [f"{raw.get('model_type')} (model_type)"]
    if not isinstance(named, list) or len(named) != 1:
        raise _invalid("architectures", f"must name one class, not {named!r}")
    by_type = {f"{kind} (model_type)": kind for kind in ARCHITECTURES.values()}
    architecture = (ARCHITECTURES | by_type).get(str(named[0]))
    if architecture is None:
        raise _invalid("architectures", f"{named[0]} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return architecture


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise _invalid("hidden_act", f"only silu is supported, not {raw['hidden_act']!r}")
    if raw.get("quantization_config") is not None:
        raise _invalid("quantization_config", "quantised checkpoints are not supported")
    if raw.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise _invalid("partial_rotary_factor", f"only 1.0 is supported, not {raw['partial_rotary_factor']!r}")
    kinds = raw.get("layer_types") or []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            raise _invalid("layer_types", f"only full_attention is supported, not {kind!r}")
    # Without layer_types a window is in use from layer `max_window_layers` on (28 where it is left out).
    windowed = raw.get("use_sliding_window") and raw.get("sliding_window", 4096) is not None
    if windowed and not kinds and _count(raw, "max_window_layers", 28) < _count(raw, "num_hidden_layers"):
        raise _invalid("use_sliding_window", "sliding-window attention is not supported")


def _rope(raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Theta and scaling from `rope_parameters`, or from `rope_theta` and `rope_scaling`, its older spelling."""
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    if new is not None and old is not None and new != old:
        raise _invalid("rope_scaling", "differs from rope_parameters; give one of the two")
    name = "rope_parameters" if new is not None else "rope_scaling"
    rope = new if new is not None else old
    if rope is None:
        rope = {}
    if not isinstance(rope, Mapping):
        raise _invalid(name, f"must be an object, not {rope!r}")
    theta = _number(rope if "rope_theta" in rope else raw, "rope_theta", 10000.0)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _invalid(f"{name}.partial_rotary_factor", f"only 1.0 is supported, not {rope['partial_rotary_factor']!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise _invalid(name, "rope parameters per layer type are not supported")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _invalid(f"{name}.rope_type", f"scaling {kind!r} is not supported; supported: default, llama3")
    scaling = Llama3Scaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_positions=_count(rope, "original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise _invalid(f"{name}.high_freq_factor", "must be above low_freq_factor")
    return theta, scaling


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    value = (generation or {}).get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < _count(raw, "vocab_size") for i in ids):
        raise _invalid("eos_token_id", f"must be ids of the vocabulary, not {value!r}")
    return tuple(dict.fromkeys(ids))


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise _invalid(name, "is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _invalid(name, f"must be a positive integer, not {value!r}")
    return value


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise _invalid(name, "is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= float_info.max:
        raise _invalid(name, f"must be a positive number, not {value!r}")
    return float(value)


def _flag(raw: Mapping[str, Any], name: str) -> bool:
    value = raw.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _invalid(name, f"must be true or false, not {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsInvalid(f"{path}: cannot be read as JSON: {error}", field=path.name) from error
    if not isinstance(value, dict):
        raise WeightsInvalid(f"{path}: must hold an object", field=path.name)
    return value


def _invalid(name: str, message: str) -> WeightsInvalid:
    return WeightsInvalid(f"config.json: {name}: {message}", field=name)

"""Checkpoints that are whole, and every way in which one is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError, WeightsIncomplete, WeightsInvalid
from engine.memory.memory import Memory
from engine.model.config import read_model_config
from engine.weights.arena import Arena
from engine.weights.checkpoint import INDEX, read_checkpoint
from tests.rigs import RandModel, write_checkpoint, write_rand

CPU = torch.device("cpu")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"
SHARD = "model-00002-of-00003.safetensors"


def arena_of(path: Path, dtype: torch.dtype = torch.float32) -> Arena:
    return Arena(read_model_config(path), dtype, Memory(CPU), "weights")


def read(path: Path, arena: Arena, checksums: dict[str, str] | None = None, scratch: int = 4096) -> Arena:
    """A small scratch buffer, so that every tensor comes in pieces."""
    read_checkpoint(path, arena, torch.empty(scratch, dtype=torch.uint8), checksums)
    return arena


def refusal(
    path: Path, kind: type[WeightsError], arena: Arena | None = None, **options: dict[str, str]
) -> WeightsError:
    with pytest.raises(kind) as caught:
        read(path, arena or arena_of(path), **options)
    assert caught.value.code == kind.code
    return caught.value


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_rand(tmp_path / "three", shards=3)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "model", [RandModel(), RandModel("qwen2"), RandModel("llama", tied=True)], ids=lambda m: m.architecture
)
def test_every_tensor_arrives_under_its_name(tmp_path: Path, model: RandModel, shards: int) -> None:
    path = write_rand(tmp_path / "m", model, shards=shards)
    found = read(path, arena_of(path)).parts
    expected = model.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_single_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    path = write_rand(tmp_path / "m")
    whole = read(path, arena_of(path))
    assert torch.equal(
        read(path / "model.safetensors", arena_of(path)).parts["lm_head.weight"], whole.parts["lm_head.weight"]
    )


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("worker", [torch.float32, torch.bfloat16])
def test_sources_are_taken_by_value(tmp_path: Path, source: torch.dtype, worker: torch.dtype) -> None:
    model = RandModel(dtype=source)
    path = write_rand(tmp_path / "m", model)
    found = read(path, arena_of(path, worker))
    for name, tensor in model.tensors().items():
        assert torch.equal(found.parts[name], tensor.to(worker)), name


def test_one_shard_may_be_bf16_and_another_fp32(sharded: Path) -> None:
    file = sharded / SHARD
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(halves, file)
    found = read(sharded, arena_of(sharded)).parts
    for name, tensor in halves.items():
        assert torch.equal(found[name], tensor.float())


def plant(path: Path, name: str, values: list[float]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[: len(values)] = torch.tensor(values)
    save_file(tensors, file)


def test_fp32_is_rounded_to_the_nearest_even_bf16(tmp_path: Path) -> None:
    path = write_rand(tmp_path / "m")
    name = "model.layers.1.mlp.up_proj.weight"
    plant(path, name, [1.00390625, 1.01171875, -1.00390625, 1.0039064, 3.38e38, 1e-41])
    found = read(path, arena_of(path, torch.bfloat16)).parts[name].view(-1)
    assert found[:5].tolist() == [1.0, 1.015625, -1.0, 1.0078125, torch.tensor(3.38e38).bfloat16().item()]
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [3.4e38, float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_in_the_workers_dtype_is_refused(tmp_path: Path, value: float) -> None:
    """3.4e38 is a finite fp32 and an infinite bf16."""
    path = write_rand(tmp_path / "m")
    name = "model.layers.1.self_attn.k_norm.weight"
    plant(path, name, [1.0, 2.0, value])
    error = refusal(path, WeightsInvalid, arena_of(path, torch.bfloat16))
    assert error.field == name
    assert "element 2" in str(error)
    if value == 3.4e38:
        read(path, arena_of(path))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float64, torch.uint8, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    model = RandModel()
    tensors = model.tensors()
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.ones_like(tensors[name]).to(dtype)
    error = refusal(write_checkpoint(tmp_path / "m", model.config(), tensors), WeightsInvalid)
    assert error.field == name
    assert "expected dtype F32, F16, BF16, found" in str(error)


def without_shard(path: Path) -> None:
    (path / SHARD).unlink()


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        os.truncate(path / SHARD, size((path / SHARD).stat().st_size))

    return change


def as_pointer(path: Path) -> None:
    (path / SHARD).write_bytes(LFS)


def as_directory(path: Path) -> None:
    (path / SHARD).unlink()
    (path / SHARD).mkdir()


def as_pipe(path: Path) -> None:
    (path / SHARD).unlink()
    os.mkfifo(path / SHARD)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (without_shard, "No such file"),
        (cut(lambda size: size - 1), "expected"),
        (cut(lambda size: size // 2), "expected"),
        (cut(lambda _: 100), "header alone"),
        (cut(lambda _: 7), "too few"),
        (cut(lambda _: 0), "too few"),
        (as_pointer, "Git LFS pointer"),
        (as_directory, "not a regular file"),
        (as_pipe, "not a regular file"),
    ],
    ids=["missing", "one byte", "half", "in the header", "in the prefix", "empty", "LFS pointer", "directory", "pipe"],
)
def test_a_shard_that_is_not_whole_is_named(sharded: Path, fault: Callable[[Path], None], words: str) -> None:
    arena = arena_of(sharded)
    fault(sharded)
    error = refusal(sharded, WeightsIncomplete, arena)
    assert error.field == SHARD
    assert SHARD in str(error)
    assert words in str(error)


def test_a_longer_file_is_refused(sharded: Path) -> None:
    with (sharded / SHARD).open("ab") as file:
        file.write(b"\0")
    assert refusal(sharded, WeightsInvalid).field == SHARD


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 64,
        b"\x05\0\0\0\0\0\0\0[1,2]",
        b'\x05\0\0\0\0\0\0\0{"a":',
        b"\x20\x4e\0\0\0\0\0\0" + b"[" * 20_000,
        b"PK\x03\x04\0\0\x08\x08" + b"a zip file, as torch.save writes",
    ],
    ids=["noise", "no object", "no JSON", "deep", "zip"],
)
def test_a_foreign_file_is_refused(sharded: Path, raw: bytes) -> None:
    arena = arena_of(sharded)
    (sharded / SHARD).write_bytes(raw)
    error = refusal(sharded, WeightsInvalid, arena)
    assert error.field == SHARD


def rewrite_header(file: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    """Change the header of a safetensors file and leave its data."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


HEADER_FAULTS: dict[str, Callable[[dict[str, dict[str, object]]], object]] = {
    "overlap": lambda h: h["model.norm.weight"].update(data_offsets=[0, 256]),
    "shape of other bytes": lambda h: h["model.norm.weight"].update(shape=[65]),
    "negative": lambda h: h["model.norm.weight"].update(shape=[-64]),
    "no dtype": lambda h: h["model.norm.weight"].pop("dtype"),
    "odd dtype": lambda h: h["model.norm.weight"].update(dtype="F31"),
    "list for a dtype": lambda h: h["model.norm.weight"].update(dtype=["F32"]),
    "text offsets": lambda h: h["model.norm.weight"].update(data_offsets="ab"),
    "no entry": lambda h: h.update({"model.norm.weight": 3}),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("fault", list(HEADER_FAULTS))
def test_a_malformed_header_is_refused(tmp_path: Path, fault: str) -> None:
    path = write_rand(tmp_path / "m")
    rewrite_header(path / "model.safetensors", HEADER_FAULTS[fault])
    assert refusal(path, WeightsInvalid).field == "model.safetensors"


def test_a_name_twice_in_one_header_is_refused(tmp_path: Path) -> None:
    path = write_rand(tmp_path / "m")

    def twice(header: dict[str, dict[str, object]]) -> bytes:
        entry = json.dumps(header["model.norm.weight"])
        return json.dumps(header)[:-1].encode() + f', "model.norm.weight": {entry}}}'.encode()

    rewrite_header(path / "model.safetensors", twice)
    assert "model.norm.weight twice" in str(refusal(path, WeightsInvalid))


def edit_index(path: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_an_index_that_names_a_tensor_no_shard_has(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"model.layers.2.mlp.up_proj.weight": SHARD}))
    error = refusal(sharded, WeightsIncomplete)
    assert error.field == "model.layers.2.mlp.up_proj.weight"
    assert SHARD in str(error)


def test_an_index_that_leaves_a_tensor_out(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.pop("model.norm.weight"))
    assert refusal(sharded, WeightsInvalid).field == "model.norm.weight"


def test_an_index_that_puts_a_tensor_elsewhere(sharded: Path) -> None:
    edit_index(sharded, lambda m: m.update({"model.norm.weight": "model-00001-of-00003.safetensors"}))
    assert refusal(sharded, WeightsIncomplete).field == "model.norm.weight"


def test_several_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    error = refusal(sharded, WeightsIncomplete)
    assert error.field == INDEX
    assert SHARD in str(error)


@pytest.mark.parametrize("keep", [0, 1, 40, -2])
def test_an_index_that_is_cut(sharded: Path, keep: int) -> None:
    (sharded / INDEX).write_bytes((sharded / INDEX).read_bytes()[:keep])
    assert refusal(sharded, WeightsIncomplete).field == INDEX


@pytest.mark.parametrize(
    "raw", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b"}}']
)
def test_an_index_that_is_no_index(sharded: Path, raw: str) -> None:
    (sharded / INDEX).write_text(raw)
    assert refusal(sharded, WeightsInvalid).field == INDEX


def test_an_index_beside_a_single_file_is_ambiguous(sharded: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, sharded / "model.safetensors")
    assert refusal(sharded, WeightsInvalid).field == INDEX


def test_a_file_of_something_else_beside_a_single_file(tmp_path: Path, sharded: Path) -> None:
    """Like an optimizer's; but not what may be shards of the weights."""
    path = write_rand(tmp_path / "m")
    save_file({"step": torch.ones(1)}, path / "optimizer.safetensors")
    read(path, arena_of(path))
    save_file(load_file(sharded / SHARD), path / SHARD)
    assert refusal(path, WeightsIncomplete).field == INDEX
    (path / SHARD).unlink()
    (path / "model.safetensors").rename(path / "weights.safetensors")
    assert refusal(path, WeightsIncomplete).field == INDEX
    (path / "optimizer.safetensors").unlink()
    read(path, arena_of(path))


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first = sharded / "model-00001-of-00003.safetensors"
    save_file(load_file(first) | {"model.norm.weight": torch.ones(64)}, first)
    error = refusal(sharded, WeightsInvalid)
    assert error.field == "model.norm.weight"


def test_nothing_there(tmp_path: Path, sharded: Path) -> None:
    arena = arena_of(sharded)
    assert "no such" in str(refusal(tmp_path / "nowhere", WeightsIncomplete, arena))
    assert "too long" in str(refusal(tmp_path / ("a" * 4000), WeightsIncomplete, arena))
    (tmp_path / "empty").mkdir()
    assert "no safetensors" in str(refusal(tmp_path / "empty", WeightsIncomplete, arena))


def test_names_beyond_the_model_and_names_that_lack(tmp_path: Path) -> None:
    model = RandModel()
    arena = arena_of(write_rand(tmp_path / "m", model))
    more = model.tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}
    error = refusal(write_checkpoint(tmp_path / "more", model.config(), more), WeightsInvalid, arena)
    assert error.field == "model.layers.0.self_attn.q_proj.bias"
    for name in model.tensors():
        less = {other: tensor for other, tensor in model.tensors().items() if other != name}
        error = refusal(write_checkpoint(tmp_path / "less", model.config(), less), WeightsIncomplete, arena)
        assert error.field == name


@pytest.mark.parametrize("name", ["model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("wrong", [lambda t: t.T.contiguous(), lambda t: t[:-1], lambda t: t.reshape(-1)])
def test_a_wrong_shape_is_named_with_both_shapes(
    tmp_path: Path, name: str, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = RandModel()
    tensors = model.tensors()
    right, tensors[name] = tensors[name], wrong(tensors[name]).clone()
    error = refusal(write_checkpoint(tmp_path / "m", model.config(), tensors, shards=2), WeightsInvalid)
    assert error.field == name
    assert f"expected shape {list(right.shape)}, found {list(tensors[name].shape)}" in str(error)


@pytest.mark.parametrize("shards", [1, 2], ids=["head first in the file", "head in a later file"])
def test_a_head_beside_tied_weights(tmp_path: Path, shards: int) -> None:
    """Equal is fine in whatever order the two are read; different is refused."""
    model = RandModel(tied=True)
    arena = arena_of(write_rand(tmp_path / "m", model))
    tensors = model.tensors()
    head = tensors["model.embed_tokens.weight"].clone()
    read(write_checkpoint(tmp_path / "equal", model.config(), tensors | {"lm_head.weight": head}, shards), arena)
    assert torch.equal(arena.parts["model.embed_tokens.weight"], head)
    other = head.clone()
    other[-1, -1] += 1.0
    path = write_checkpoint(tmp_path / "other", model.config(), tensors | {"lm_head.weight": other}, shards)
    assert refusal(path, WeightsInvalid, arena).field == "lm_head.weight"


def test_a_tied_head_is_compared_in_the_workers_dtype(tmp_path: Path) -> None:
    model = RandModel(tied=True)
    tensors = model.tensors()
    rounded = tensors["model.embed_tokens.weight"].bfloat16().float()
    path = write_checkpoint(tmp_path / "m", model.config(), tensors | {"lm_head.weight": rounded})
    read(path, arena_of(path, torch.bfloat16))
    refusal(path, WeightsInvalid)


def test_an_untied_model_without_a_head(tmp_path: Path) -> None:
    tied = write_rand(tmp_path / "tied", RandModel(tied=True))
    arena = arena_of(write_rand(tmp_path / "untied"))
    assert refusal(tied, WeightsIncomplete, arena).field == "lm_head.weight"


def sums_of(path: Path, pattern: str = "*.safetensors") -> dict[str, str]:
    return {file.name: f"sha256:{sha256(file.read_bytes()).hexdigest()}" for file in path.glob(pattern)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_that_match(sharded: Path, dtype: torch.dtype) -> None:
    read(sharded, arena_of(sharded, dtype), sums_of(sharded))
    read(sharded, arena_of(sharded, dtype), sums_of(sharded, "*"))
    read(sharded, arena_of(sharded, dtype), {SHARD: sums_of(sharded)[SHARD].removeprefix("sha256:").upper()})


def test_checksums_that_do_not_match(sharded: Path) -> None:
    good = sums_of(sharded, "*")
    for name in (SHARD, INDEX):
        error = refusal(sharded, WeightsInvalid, checksums=good | {name: "sha256:" + "0" * 64})
        assert error.field == name
        assert good[name] in str(error)
    for name in ("model-00004-of-00003.safetensors", "../three/config.json"):
        assert refusal(sharded, WeightsInvalid, checksums=good | {name: "sha256:" + "0" * 64}).field == name
    assert "name too long" in str(refusal(sharded, WeightsIncomplete, checksums={"x" * 300: "sha256:"}))


def test_one_flipped_bit_is_seen_by_the_checksum_alone(sharded: Path) -> None:
    sums, raw = sums_of(sharded), bytearray((sharded / SHARD).read_bytes())
    raw[-4] ^= 1
    (sharded / SHARD).write_bytes(raw)
    read(sharded, arena_of(sharded))
    assert refusal(sharded, WeightsInvalid, checksums=sums).field == SHARD

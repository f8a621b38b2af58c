"""Weight updates: prepared beside what serves, committed in place, refused without a trace."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import WeightsBusy, WeightsError, WeightsIncomplete, WeightsInvalid
from engine.request import Completion
from engine.start.build import LoadedEngine
from engine.weights.checkpoint import INDEX
from engine.weights.update import weights_digest
from tests.engine.serve import ask, assert_equal, check_greedy, ids, load, serve, update
from tests.rigs import RandModel, Reference, write_checkpoint, write_rand

PROMPT = ids(1, 64)
W1, W2 = RandModel(seed=1), RandModel(seed=2)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return write_rand(tmp_path / "w1", W1)


@pytest.fixture
def second(tmp_path: Path) -> Path:
    return write_rand(tmp_path / "w2", W2)


def reply(loaded: LoadedEngine, name: str = "a") -> Completion:
    return serve(loaded, ask(name, PROMPT))[name]


def test_after_an_update_nothing_comes_from_the_old_weights(first: Path, second: Path, lazy: bool) -> None:
    loaded = load(first, lazy=lazy)
    old = reply(loaded)
    update(loaded, second, 2)
    fresh = load(second)
    new = reply(loaded)
    assert new.cached_tokens == 0
    assert new.weight_versions == ((2, 8),)
    assert_equal(new, reply(fresh), 1e-5)
    check_greedy(new, PROMPT, Reference(second))
    sharing = np.concatenate((PROMPT[:48], ids(2, 20)))
    found = serve(loaded, ask("sharing", sharing))["sharing"]
    assert found.cached_tokens == 48
    assert_equal(found, serve(load(second), ask("sharing", sharing))["sharing"], 1e-5)

    update(loaded, first, 3)
    back = reply(loaded)
    assert back.cached_tokens == 0
    assert back.weight_versions == ((3, 8),)
    assert_equal(back, old, 1e-5)


def test_a_commit_moves_nothing(first: Path, second: Path) -> None:
    loaded = load(first)
    model = loaded.engine._runner._device.model  # type: ignore[attr-defined]
    tensors = [
        model.embedding,
        model.norm,
        model.head,
        model.rope,
        loaded.kv.data,
        *loaded.weights.arena.parts.values(),
    ]
    tensors += [
        getattr(layer, name) for layer in model.layers for name in layer.__slots__ if getattr(layer, name) is not None
    ]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for version in range(2, 5):
        update(loaded, (first, second)[version % 2], version)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    for name, tensor in W1.tensors().items():
        assert torch.equal(loaded.weights.arena.parts[name], tensor)


def test_prepare_changes_nothing_until_commit(first: Path, second: Path) -> None:
    loaded = load(first)
    before, digest = loaded.weights.arena.flat.clone(), loaded.weights.digest
    info = loaded.weights.prepare(str(second), 9)
    assert loaded.weights.arena.flat.equal(before)
    assert loaded.weights.digest == digest != info.digest
    assert info.version == 9
    assert info.nbytes == sum(tensor.nbytes for tensor in W2.tensors().values())
    loaded.weights.commit()
    assert loaded.weights.digest == info.digest
    assert loaded.weights.arena.flat.ne(before).any()


def test_only_what_is_prepared_can_be_committed(first: Path, second: Path) -> None:
    loaded = load(first)
    before = loaded.weights.arena.flat.clone()
    loaded.weights.discard()
    with pytest.raises(WeightsError):
        loaded.weights.commit()
    loaded.weights.prepare(str(second), 2)
    loaded.weights.discard()
    with pytest.raises(WeightsError):
        loaded.weights.commit()
    loaded.weights.prepare(str(second), 2)
    with pytest.raises(WeightsIncomplete):
        loaded.weights.prepare(str(second / "nowhere"), 3)
    with pytest.raises(WeightsError):
        loaded.weights.commit()
    loaded.weights.prepare(str(second), 4)
    loaded.weights.commit()
    with pytest.raises(WeightsError):
        loaded.weights.commit()
    assert loaded.weights.arena.flat.ne(before).any()


def transposed(model: RandModel) -> dict[str, torch.Tensor]:
    tensors = model.tensors()
    name = "model.layers.1.mlp.down_proj.weight"
    return tensors | {name: tensors[name].T.contiguous()}


def last_wrong(model: RandModel) -> dict[str, torch.Tensor]:
    return model.tensors() | {"lm_head.weight": torch.zeros(512, 63)}


def last_nan(model: RandModel) -> dict[str, torch.Tensor]:
    tensors = model.tensors()
    tensors["lm_head.weight"][-1, -1] = float("nan")
    return tensors


def without_q_norm(model: RandModel) -> dict[str, torch.Tensor]:
    return {
        name: tensor for name, tensor in model.tensors().items() if name != "model.layers.1.self_attn.q_norm.weight"
    }


BAD: dict[str, tuple[RandModel, Callable[[RandModel], dict[str, torch.Tensor]], list[str]]] = {
    "transposed": (W2, transposed, ["model.layers.1.mlp.down_proj.weight", "[64, 128]", "[128, 64]"]),
    "hidden 96": (RandModel(hidden=96), RandModel.tensors, ["[512, 64]", "[512, 96]"]),
    "one layer more": (RandModel(layers=3), RandModel.tensors, ["model.layers.2."]),
    "one layer less": (RandModel(layers=1), RandModel.tensors, ["model.layers.1."]),
    "last tensor's shape": (W2, last_wrong, ["lm_head.weight", "[512, 64]", "[512, 63]"]),
    "last tensor's value": (W2, last_nan, ["lm_head.weight", "nan", "finite"]),
    "q_norm missing": (W2, without_q_norm, ["model.layers.1.self_attn.q_norm.weight", "missing"]),
    "other heads": (RandModel(heads=2, kv_heads=1), RandModel.tensors, ["k_proj", "[64, 64]", "[32, 64]"]),
    "other vocabulary": (RandModel(vocab=520), RandModel.tensors, ["[512, 64]", "[520, 64]"]),
}


@pytest.mark.parametrize("case", list(BAD))
@pytest.mark.parametrize("shards", [1, 3])
def test_a_checkpoint_of_another_size_is_refused_whole(
    first: Path, second: Path, tmp_path: Path, case: str, shards: int
) -> None:
    model, tensors, words = BAD[case]
    loaded = load(first)
    before, digest = reply(loaded, "before"), loaded.weights.digest
    served = loaded.weights.arena.flat.clone()
    path = write_checkpoint(tmp_path / "bad", model.config(), tensors(model), shards)
    with pytest.raises(WeightsError) as caught:
        update(loaded, path, 2)
    assert all(word in str(caught.value) for word in words), caught.value
    assert loaded.weights.arena.flat.equal(served)
    assert loaded.weights.digest == digest
    after = reply(loaded, "after")
    assert after.weight_versions == ((0, 8),)
    assert after.cached_tokens == 48, "the cache is still good"
    assert_equal(after, before, 1e-5)
    update(loaded, second, 3)
    assert_equal(reply(loaded), reply(load(second)), 1e-5)


@pytest.mark.parametrize("fault", ["missing shard", "cut shard", "pointer", "cut index"])
def test_a_checkpoint_that_is_not_whole_leaves_the_old_weights_serving(first: Path, tmp_path: Path, fault: str) -> None:
    loaded = load(first)
    before = reply(loaded, "before")
    path = write_rand(tmp_path / "three", W2, shards=3)
    shard = path / "model-00002-of-00003.safetensors"
    if fault == "missing shard":
        shard.unlink()
    elif fault == "cut shard":
        os.truncate(shard, shard.stat().st_size - 1)
    elif fault == "pointer":
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    else:
        (path / INDEX).write_text((path / INDEX).read_text()[:-9])
    with pytest.raises(WeightsIncomplete) as caught:
        update(loaded, path, 2)
    assert caught.value.field == (INDEX if fault == "cut index" else shard.name)
    assert_equal(reply(loaded, "after"), before, 1e-5)
    with pytest.raises(WeightsIncomplete):
        load(path)


def test_shards_of_two_steps_are_not_taken_for_one_set(first: Path, tmp_path: Path) -> None:
    """A trainer that writes its next step over a directory that is being read."""
    loaded = load(first)
    before, digest = reply(loaded, "before"), loaded.weights.digest
    path, newer = (
        write_rand(tmp_path / "three", W2, shards=3),
        write_rand(tmp_path / "newer", RandModel(seed=9), shards=3),
    )
    last = "model-00003-of-00003.safetensors"

    def replace(*_: object) -> None:
        if (newer / last).exists():
            (newer / last).replace(path / last)

    with pytest.raises(WeightsIncomplete, match="was replaced while it was read") as caught:
        loaded.weights.prepare(str(path), 2, progress=replace)
    assert caught.value.field == last
    with pytest.raises(WeightsError, match="nothing is prepared"):
        loaded.weights.commit()
    assert loaded.weights.digest == digest
    assert_equal(reply(loaded, "after"), before, 1e-5)


def test_a_config_of_another_function_is_refused(first: Path, second: Path) -> None:
    """Same shapes, another rope: the weights would fit, and mean something else."""
    config = json.loads((second / "config.json").read_text())
    loaded = load(first)
    for name, value, field in (
        ("rope_theta", 5000.0, "rope_theta"),
        ("rms_norm_eps", 1e-5, "rms_norm_eps"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "rope_scaling.rope_type"),
    ):
        (second / "config.json").write_text(json.dumps(config | {name: value}))
        with pytest.raises(WeightsInvalid) as caught:
            update(loaded, second, 2)
        assert caught.value.field == field
    (second / "config.json").unlink()
    update(loaded, second, 2)
    update(loaded, first / "model.safetensors", 3)
    assert loaded.engine.weight_version == 3


@pytest.mark.parametrize("head", ["absent", "equal"])
def test_a_tied_update_reaches_the_head_as_well(tmp_path: Path, head: str) -> None:
    w1, w2 = RandModel(tied=True, seed=1), RandModel(tied=True, seed=2)
    loaded = load(write_rand(tmp_path / "w1", w1))
    reply(loaded)
    tensors = w2.tensors()
    whole = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    path = write_checkpoint(tmp_path / "w2", w2.config(), whole if head == "equal" else tensors)
    update(loaded, path, 2)
    found = reply(loaded)
    check_greedy(found, PROMPT, Reference(write_rand(tmp_path / "fresh", w2)))
    assert loaded.weights.digest == weights_digest(tensors), "a tied head counts once"


def test_a_tied_update_with_another_head_is_refused(tmp_path: Path) -> None:
    w1, w2 = RandModel(tied=True, seed=1), RandModel(tied=True, seed=2)
    loaded = load(write_rand(tmp_path / "w1", w1))
    before = reply(loaded, "before")
    other = w2.tensors() | {"lm_head.weight": w1.tensors()["model.embed_tokens.weight"]}
    with pytest.raises(WeightsInvalid) as caught:
        update(loaded, write_checkpoint(tmp_path / "w2", w2.config(), other), 2)
    assert caught.value.field == "lm_head.weight"
    assert_equal(reply(loaded, "after"), before, 1e-5)


def test_an_untied_update_without_a_head_is_refused(first: Path, tmp_path: Path) -> None:
    tensors = W2.tensors()
    del tensors["lm_head.weight"]
    loaded = load(first)
    with pytest.raises(WeightsIncomplete) as caught:
        update(loaded, write_checkpoint(tmp_path / "bad", W2.config(), tensors), 2)
    assert caught.value.field == "lm_head.weight"


@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_a_bf16_worker_stays_one_and_does_not_grow(tmp_path: Path, source: torch.dtype) -> None:
    model = RandModel(dtype=source, vocab=20_000, hidden=128)
    path = write_rand(tmp_path / "m", model)
    file, name = path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    tensors[name].view(-1)[:2] = torch.tensor([1.00390625, 1.01171875])
    save_file(tensors, file)
    loaded = load(path, dtype="bfloat16")
    update(loaded, path, 1)
    before, planned = psutil.Process().memory_info().rss, len(loaded.memory.allocations)
    for version in range(2, 12):
        update(loaded, path, version)
    assert loaded.weights.arena.parts[name].view(-1)[:2].tolist() == [1.0, 1.015625]
    assert all(view.dtype == torch.bfloat16 for view in loaded.weights.arena.parameters.values())
    assert len(loaded.memory.allocations) == planned
    assert psutil.Process().memory_info().rss - before < loaded.weights.arena.nbytes / 2


def test_the_digest_is_what_its_text_says() -> None:
    """Computed here from the text alone, so that a trainer in another language can."""
    tensors = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([3, 4, 5], dtype=torch.bfloat16)}
    expected = sha256()
    expected.update(b"a [3]\n" + sha256(np.array([0x4040, 0x4080, 0x40A0], "<u2").tobytes()).digest())
    expected.update(b"b [1, 2]\n" + sha256(np.array([1, 2], "<f4").tobytes()).digest())
    assert weights_digest(tensors) == f"sha256:{expected.hexdigest()}"


def test_the_digest_is_of_the_workers_dtype_and_not_of_the_files(tmp_path: Path) -> None:
    wide = write_rand(tmp_path / "f32", W1)
    sharded = write_rand(tmp_path / "sharded", W1, shards=3)
    narrow = write_checkpoint(tmp_path / "bf16", W1.config(), {n: t.bfloat16() for n, t in W1.tensors().items()})
    digests = {path.name: load(path, dtype="bfloat16").weights.digest for path in (wide, sharded, narrow)}
    assert len(set(digests.values())) == 1
    assert load(wide).weights.digest == weights_digest(W1.tensors()) != digests["f32"]
    assert load(narrow).weights.digest != load(wide).weights.digest


def test_one_bit_changes_the_digest() -> None:
    tensors = W1.tensors()
    before = weights_digest(tensors)
    tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
    assert weights_digest(tensors) != before


def test_two_prepares_at_once_are_one_too_many(first: Path, second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is told so, the first goes on, and steps run meanwhile."""
    from engine.weights import update as update_module

    reading, go_on = threading.Event(), threading.Event()
    real = update_module.read_checkpoint

    def slow(*args: object) -> None:
        reading.set()
        assert go_on.wait(30)
        real(*args)  # type: ignore[arg-type]

    loaded = load(first)
    before = reply(loaded, "before")
    monkeypatch.setattr(update_module, "read_checkpoint", slow)
    thread = threading.Thread(target=loaded.weights.prepare, args=(str(second), 2))
    thread.start()
    assert reading.wait(30)
    with pytest.raises(WeightsBusy):
        loaded.weights.prepare(str(second), 3)
    assert_equal(reply(loaded, "meanwhile"), before, 1e-5)
    go_on.set()
    thread.join(30)
    loaded.engine.commit(loaded.weights.commit, 2)
    assert_equal(reply(loaded), reply(load(second)), 1e-5)

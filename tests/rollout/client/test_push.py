"""Pushing a live model: what is written, what is refused, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.weights.update import weights_digest
from protocols.errors import (
    BadRequest,
    ConnectionLost,
    RolloutError,
    Timeout,
    WeightsBusy,
    WeightsIncomplete,
    WeightsInvalid,
)
from rollout.client import AsyncRolloutClient, ClientClosed, RolloutClient
from rollout.client.push import EMBEDDING, HEAD, PushedWeights, hf_name, hf_tensors, write_weights
from rollout.local import local_worker
from tests.rigs import RandModel, write_rand
from tests.rollout.client.test_processes import python
from tests.rollout.real_worker import real_worker
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import WorkerThread, soon, worker

HERE = "tcp://127.0.0.1:5555"


def tensors(value: float = 0.5) -> dict[str, torch.Tensor]:
    return {
        EMBEDDING: torch.full((6, 4), value),
        "model.norm.weight": torch.ones(4),
        HEAD: torch.full((6, 4), -value),
    }


def pushes(folder: Path) -> list[str]:
    """Names of the directories of all clients under `folder`, those half written (`.name`) too."""
    return sorted(path.name for path in folder.glob("*/*"))


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# Names and tensors


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.module.lm_head.weight", HEAD),
        ("model.layers.0._orig_mod.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        (
            "_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight",
            "model.layers.3.mlp.up_proj.weight",
        ),
    ],
)
def test_what_wrappers_add_to_names_is_taken_off(given: str, name: str) -> None:
    assert hf_name(given) == name


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "model.layers.0.self_attn.q_proj.base_layer.weight",
        "lm_head.modules_to_save.default.weight",
        "module.model.layers.0.mlp.up_proj.lora_magnitude_vector.default.weight",
    ],
)
def test_an_adapters_names_are_refused_and_say_what_to_do(name: str) -> None:
    with pytest.raises(WeightsInvalid, match="merge_and_unload") as caught:
        hf_name(name)
    assert caught.value.field == name


def test_a_real_model_wrapped_and_compiled_gives_the_checkpoints_names() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    for tied in (True, False):
        model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=tied))
        expected = sorted(name for name in model.state_dict() if not (tied and name == HEAD))
        for wrapped in (model, torch.compile(model), torch.nn.Sequential()):
            if isinstance(wrapped, torch.nn.Sequential):
                wrapped.add_module("module", model)  # as DDP holds it
            assert sorted(name for name, _ in hf_tensors(wrapped)) == expected


class Shard(torch.Tensor):
    """What a DTensor looks like from outside."""

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("a collective call, on one process alone, would never return")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (HEAD, torch.zeros(6, 4, dtype=torch.float64), "float64"),
        ("model.norm.weight", torch.zeros(4, dtype=torch.int8), "int8"),
        ("model.norm.weight", torch.zeros(4, device="meta"), "meta device"),
        ("model.norm.weight", torch.zeros(4).as_subclass(Shard), "full_tensor"),
        ("model.norm.weight", torch.zeros(4).to_sparse(), "sparse_coo, not dense"),
        ("model.norm.weight", [1.0], "a list, not a tensor"),
        ("module.model.norm.weight", torch.zeros(4), "are both model.norm.weight"),
    ],
)
def test_a_tensor_that_cannot_be_handed_over_is_named(name: str, tensor: Any, said: str) -> None:
    with pytest.raises(WeightsInvalid, match=said) as caught:
        list(hf_tensors({**tensors(), name: tensor}))
    assert caught.value.field == hf_name(name)


@pytest.mark.parametrize("weights", [3, "/some/checkpoint", Path("/some/checkpoint"), None])
def test_what_holds_no_tensors_at_all(weights: Any) -> None:
    with pytest.raises(BadRequest, match="update_weights"):
        list(hf_tensors(weights))


def test_tensors_without_names() -> None:
    with pytest.raises(BadRequest, match="found a Parameter") as caught:
        list(hf_tensors(torch.nn.Linear(2, 2).parameters()))  # type: ignore[arg-type]
    assert caught.value.field == "weights"


def test_a_head_that_is_the_embedding_is_left_out_wherever_it_comes() -> None:
    shared = torch.rand(6, 4)
    for pairs in ([(EMBEDDING, shared), (HEAD, shared)], [(HEAD, shared), (EMBEDDING, shared)]):
        assert [name for name, _ in hf_tensors(pairs)] == [EMBEDDING]
    equal = [(EMBEDDING, shared), (HEAD, shared.clone())]
    assert [name for name, _ in hf_tensors(equal)] == [EMBEDDING, HEAD]


def test_tensors_made_one_by_one_at_the_same_address_are_not_taken_for_each_other() -> None:
    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in ((EMBEDDING, 1.0), ("model.norm.weight", 2.0), (HEAD, 3.0)):
            yield name, torch.full((512, 512), value)  # large enough that the allocator gives the block out again

    found = {name: float(tensor[0, 0]) for name, tensor in hf_tensors(gathered())}
    assert found == {EMBEDDING: 1.0, "model.norm.weight": 2.0, HEAD: 3.0}


# Files


def test_one_file_or_shards_hold_the_same_tensors(tmp_path: Path) -> None:
    model = RandModel(dtype=torch.bfloat16).tensors()
    strided = {name: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for name, tensor in model.items()}
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    write_weights(strided, tmp_path / "one")
    write_weights(iter(strided.items()), tmp_path / "many", shard_bytes=20_000)
    assert files(tmp_path / "one") == ["model.safetensors"]
    one = load_file(tmp_path / "one" / "model.safetensors")

    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    home, total = index["weight_map"], index["metadata"]["total_size"]
    assert len(set(home.values())) > 3
    many = {}
    for file in sorted(set(home.values())):
        held = load_file(tmp_path / "many" / file)
        assert set(held) == {name for name, where in home.items() if where == file}
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 20_000
        many |= held
    assert set(one) == set(many) == set(model)
    assert total == sum(tensor.nbytes for tensor in model.values())
    for name, tensor in model.items():
        assert torch.equal(one[name], tensor)
        assert torch.equal(many[name], tensor)


def test_memory_that_two_names_share_is_refused_and_parts_of_one_are_not(tmp_path: Path) -> None:
    flat = torch.arange(8.0)
    write_weights({"model.a": flat[:4], "model.b": flat[4:]}, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.b"].tolist() == [4, 5, 6, 7]
    with pytest.raises(WeightsInvalid, match=r"model\.b"):
        write_weights({"model.a": flat, "model.b": flat}, tmp_path)


def test_a_directory_appears_when_it_is_whole_and_a_failure_leaves_none(tmp_path: Path) -> None:
    pushed, seen = PushedWeights(HERE), []

    def slowly(fail: bool) -> Iterator[tuple[str, torch.Tensor]]:
        yield EMBEDDING, torch.zeros(2, 2)
        seen.append([path.name for path in tmp_path.glob("*/*") if not path.name.startswith(".")])
        if fail:
            raise OSError("no space left on device")
        yield "model.norm.weight", torch.zeros(2)

    with pytest.raises(OSError, match="no space left"):
        pushed.write(slowly(fail=True), 1, tmp_path)
    assert list(tmp_path.iterdir()) == []
    path = pushed.write(slowly(fail=False), 2, tmp_path)
    assert seen == [[], []]
    assert files(path) == ["model.safetensors"]
    assert path.name.endswith("-version-2")


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path: Path) -> None:
    """Which safetensors would tell as an error of its own."""
    code = f"""
import errno, resource, signal, torch
from rollout.client.push import PushedWeights
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    PushedWeights({HERE!r}).write({{"model.norm.weight": torch.zeros(10_000)}}, 1, {str(tmp_path)!r})
except OSError as error:
    print(error.errno == errno.EFBIG, error.filename)
"""
    said, file = python(code).stdout.split()
    assert (said, Path(file).name) == ("True", "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_may_yet_serve_is_kept_until_the_next_push_does(tmp_path: Path) -> None:
    pushed = PushedWeights(HERE)

    def push(version: int, error: BaseException | None = None) -> None:
        with pushed.keeping(pushed.write(tensors(), version, tmp_path)):
            if error is not None:
                raise error

    push(1)
    with pytest.raises(Timeout):
        push(2, Timeout("no reply: the client has forgotten it"))
    assert pushes(tmp_path) == ["000001-version-1"]
    with pytest.raises(KeyboardInterrupt):
        push(3, KeyboardInterrupt())
    assert pushes(tmp_path) == ["000001-version-1", "000003-version-3"]
    push(4)
    assert pushes(tmp_path) == ["000004-version-4"]


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    pushed = PushedWeights(HERE)
    path = pushed.write(tensors(), 1, tmp_path)
    if (child := os.fork()) == 0:
        pushed.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert path.is_dir()
    pushed.close()
    assert list(tmp_path.iterdir()) == []


def test_only_a_worker_on_this_machine_can_read_a_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for address in (HERE, "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/worker.ipc"):
        pushed = PushedWeights(address)
        path = pushed.write(tensors(), 1, None)
        assert path.is_relative_to(tmp_path)
        assert path.parent.stat().st_mode & 0o077 == 0  # others on this machine do not read weights
        pushed.close()
    with pytest.raises(BadRequest, match="both see") as caught:
        PushedWeights("tcp://10.0.0.7:5555").write(tensors(), 1, None)
    assert caught.value.field == "directory"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["shard", "shard/run-7", "a-file"])
def test_a_directory_that_is_not_there_is_refused_by_name_and_not_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "a-file").touch()
    with pytest.raises(BadRequest, match=re.escape(f"is no directory here: {tmp_path / name}")) as caught:
        PushedWeights(HERE).write(tensors(), 1, tmp_path / name)
    assert caught.value.field == "directory"
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


@pytest.mark.parametrize("directory", ["", 5, ["/tmp"]])
def test_a_directory_is_a_path_and_not_an_empty_one(directory: Any) -> None:
    """An unset variable is not the temporary directory, which a worker elsewhere could not read."""
    with pytest.raises(BadRequest) as caught:
        PushedWeights("tcp://10.0.0.7:5555").write(tensors(), 1, directory)
    assert caught.value.field == "directory"


# The calls


def test_the_newest_is_kept_and_gone_with_the_client(tmp_path: Path) -> None:
    with worker() as served:
        with RolloutClient(served.address, timeout=10.0) as client:
            for version in (1, 2, 3):
                update = client.push_weights(tensors(), version, directory=tmp_path)
                assert update.version == version
                (kept,) = tmp_path.glob("rollout-weights-*/*")
                assert kept.name.endswith(f"-version-{version}")
                assert update.digest == f"stub:{kept}"
            with pytest.raises(BadRequest, match="version"):
                client.push_weights(tensors(), 2, directory=tmp_path)
            assert list(tmp_path.glob("rollout-weights-*/*")) == [kept]
            assert client.push_weights(tensors(), 2, directory=tmp_path, force=True).version == 2
            assert not kept.exists()
        assert list(tmp_path.iterdir()) == []


def test_a_dropped_client_leaves_nothing(tmp_path: Path) -> None:
    with worker() as served:
        client = RolloutClient(served.address, timeout=10.0)
        client.push_weights(tensors(), 1, directory=tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
        del client
        assert list(tmp_path.iterdir()) == []


def test_each_call_knows_what_belongs_to_the_other() -> None:
    with worker() as served, RolloutClient(served.address, timeout=10.0) as client:
        with pytest.raises(BadRequest, match="push_weights") as caught:
            client.update_weights(torch.nn.Linear(2, 2), 1)  # type: ignore[arg-type]
        assert caught.value.field == "path"
        with pytest.raises(BadRequest, match="update_weights"):
            client.push_weights("/a/checkpoint", 1)  # type: ignore[arg-type]


def test_nothing_is_written_without_a_worker_or_by_a_closed_client(tmp_path: Path) -> None:
    with RolloutClient(f"ipc://{tmp_path}/nobody", timeout=0.2) as client, pytest.raises(ConnectionLost):
        client.push_weights(tensors(), 1, directory=tmp_path, timeout=0.2)
    with pytest.raises(ClientClosed):
        client.push_weights(tensors(), 1, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_asyncio(tmp_path: Path) -> None:
    async def main(address: str) -> None:
        async with AsyncRolloutClient(address, timeout=10.0) as client:
            assert (await client.push_weights(tensors(), 1, directory=tmp_path)).version == 1
            with pytest.raises(WeightsInvalid):
                await client.push_weights({HEAD: torch.zeros(2, dtype=torch.float64)}, 2, directory=tmp_path)
            assert pushes(tmp_path) == ["000001-version-1"]

    with worker() as served:
        asyncio.run(main(served.address))
    assert list(tmp_path.iterdir()) == []


def test_a_push_that_is_cancelled_while_it_writes_removes_what_it_wrote(tmp_path: Path) -> None:
    started, go = threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        started.set()
        assert go.wait(10)
        yield from tensors().items()

    async def main(address: str) -> None:
        async with AsyncRolloutClient(address, timeout=10.0) as client:
            await client.push_weights(tensors(), 1, directory=tmp_path)
            push = asyncio.ensure_future(client.push_weights(slowly(), 2, directory=tmp_path))
            await asyncio.to_thread(started.wait, 10)
            push.cancel()
            with pytest.raises(asyncio.CancelledError):
                await push
            go.set()
            await soon(lambda: pushes(tmp_path) == ["000001-version-1"])
            assert (await client.status()).weight_version == 1

    with worker() as served:
        asyncio.run(asyncio.wait_for(main(served.address), 30))


def test_a_worker_that_restarts_is_given_what_was_pushed(tmp_path: Path) -> None:
    first = WorkerThread(TimedEngine()).start()
    with RolloutClient(first.address, timeout=10.0) as client:
        digest = client.push_weights(tensors(), 1, directory=tmp_path).digest
        with pytest.raises(WeightsInvalid):
            client.push_weights({HEAD: torch.zeros(1, dtype=torch.int64)}, 2, directory=tmp_path)
        first.call(lambda service: service._channel.close(0.0))
        second = WorkerThread(TimedEngine(), address=first.address).start()
        try:
            (trajectory,) = client.submit(client.group([1], max_tokens=2, min_version=1)).results(timeout=20)
            assert trajectory.weight_version_min == 1
            assert client.status().weight_digest == digest
        finally:
            second.stop()
            first.stop()


def test_a_real_worker_serves_what_was_pushed(tmp_path: Path) -> None:
    start, newer = RandModel(tied=True), RandModel(tied=True, seed=5).tensors()
    with (
        local_worker(write_rand(tmp_path / "start", start), log_level="warning") as served,
        RolloutClient(served.address, timeout=60.0) as client,
    ):
        live = {f"module.{name}": tensor for name, tensor in newer.items()} | {f"module.{HEAD}": newer[EMBEDDING]}
        update = client.push_weights(live, 1, directory=tmp_path)
        assert update.digest == client.status().weight_digest == weights_digest(newer)
        with pytest.raises(WeightsIncomplete, match=r"model\.norm\.weight is missing"):
            client.push_weights({n: t for n, t in newer.items() if n != "model.norm.weight"}, 2)
        with pytest.raises(WeightsInvalid, match="expected shape"):
            client.push_weights({**newer, "model.norm.weight": torch.ones(3)}, 2)
        assert client.status().weight_digest == update.digest
        assert len(list(tmp_path.glob("rollout-weights-*/*"))) == 1
        (tmp_path / "shards").mkdir()
        write_weights(newer, tmp_path / "shards", shard_bytes=50_000)
        assert len(list(tmp_path.glob("shards/*.safetensors"))) > 2
        assert client.update_weights(tmp_path / "shards", 2).digest == update.digest


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
CARELESS: dict[str, tuple[dict[str, Any], type[RolloutError], str]] = {
    "another shape": ({UP: torch.zeros(3, 3)}, WeightsInvalid, UP),
    "a transposed view": ({UP: RandModel().tensors()[UP].t()}, WeightsInvalid, UP),
    "no dimensions": ({NORM: torch.tensor(1.0)}, WeightsInvalid, NORM),
    "NaN": ({NORM: torch.full((64,), torch.nan)}, WeightsInvalid, NORM),
    "infinite as float16": ({NORM: torch.full((64,), 1e6).half()}, WeightsInvalid, NORM),
    "float64": ({NORM: torch.ones(64).double()}, WeightsInvalid, NORM),
    "eight bits": ({UP: torch.zeros(128, 64).to(torch.float8_e4m3fn)}, WeightsInvalid, UP),
    "sparse": ({UP: torch.zeros(128, 64).to_sparse()}, WeightsInvalid, UP),
    "a layer too many": ({"model.layers.9.mlp.up_proj.weight": torch.zeros(128, 64)}, WeightsInvalid, "model.layers.9"),
    "a head of its own": ({HEAD: torch.ones(512, 64)}, WeightsInvalid, HEAD),
    "a list": ({NORM: [1.0] * 64}, WeightsInvalid, NORM),
    "one less": ({NORM: ...}, WeightsIncomplete, NORM),
}


def test_a_careless_trainer_costs_nothing_of_what_runs(tmp_path: Path) -> None:
    """Each push fails by name, the old weights serve on, and turns that run meanwhile are all there."""
    model, shared = RandModel(tied=True), tmp_path / "shared"
    shared.mkdir()
    with (
        real_worker(write_rand(tmp_path / "start", model)) as served,
        RolloutClient(served.address, timeout=30.0) as client,
    ):
        batch = client.submit([client.group([1, 2, 3], n=4, max_tokens=150, script=[[5, 6]]) for _ in range(2)])
        digest = client.status().weight_digest
        for name, (changes, kind, field) in CARELESS.items():
            pushed = {n: t for n, t in (model.tensors() | changes).items() if t is not ...}
            with pytest.raises(kind) as caught:
                client.push_weights(pushed, 1, directory=shared, drain_timeout=30.0)
            assert str(caught.value.field).startswith(field), name
            status = client.status()
            assert (status.weight_version, status.weight_digest, status.state) == (0, digest, "ready"), name
        assert pushes(shared) == []

        newer, served_by, busy = [RandModel(tied=True, seed=seed).tensors() for seed in range(1, 5)], [], []

        def push(seed: int) -> None:
            try:
                served_by.append(client.push_weights(newer[seed], 10 + seed, directory=shared).version - 10)
            except (WeightsBusy, BadRequest) as error:  # the latter for a version below one that serves by then
                busy.append(error)

        threads = [threading.Thread(target=push, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert served_by
        assert len(served_by) + len(busy) == 4
        assert all(isinstance(error, WeightsBusy) or error.field == "version" for error in busy)
        assert client.status().weight_digest == weights_digest(newer[max(served_by)])
        assert pushes(shared) == [path.name for path in shared.glob(f"*/*-version-{10 + max(served_by)}")]
        records = batch.results(timeout=60)
        assert [record.status for record in records] == ["truncated"] * 8
        assert {len(record.token_ids) for record in records} == {3 + 150 + 2 + 150}

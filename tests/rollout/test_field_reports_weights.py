"""Field reports on weights, seen by a client of the whole worker over the real engine. Numbers are the reports'."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout.command.cli import parse
from rollout.command.load import load
from rollout.command.start import StartError
from tests import rigs
from tests.rollout.raw_client import RawClient, group
from tests.rollout.real_worker import real_worker
from tests.rollout.unharmed import sampled, unharmed, whole
from tests.rollout.workers import WorkerThread

W1, W2 = rigs.RandModel(seed=1), rigs.RandModel(seed=2)
PROMPT = np.random.default_rng(0).integers(0, 512, 64).tolist()
FAMILY = PROMPT[:48] + np.random.default_rng(1).integers(0, 512, 16).tolist()
Writer = Callable[[Path], Path]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("weights")
    return {number: rigs.write_rand(root / f"w{number}", model) for number, model in ((1, W1), (2, W2))}


@pytest.fixture(scope="module")
def fresh(paths: dict[int, Path]) -> dict[int, list[tuple[list[int], np.ndarray]]]:
    """What fresh workers say to the two prompts."""
    answers = {}
    for number, path in paths.items():
        with real_worker(path) as served, RawClient(served.address) as client:
            client.hello(timeout=30)
            answers[number] = [reply(client, prompt)[:2] for prompt in (PROMPT, FAMILY)]
    return answers


@pytest.fixture
def served(paths: dict[int, Path]) -> Iterator[WorkerThread]:
    with real_worker(paths[1]) as thread:
        yield thread


def reply(client: RawClient, prompt: list[int] = PROMPT) -> tuple[list[int], np.ndarray, dict[str, Any]]:
    """Greedy ids, their logprobs, and the turn."""
    asked = group(prompt=prompt, max_tokens=8, sampling={"temperature": 0.0})
    answer = client.call("submit", 30, batch_id="b", groups=[asked])
    assert answer["type"] == "accepted", answer
    record = whole(client.record(30))
    client.event("batch_done", 30)
    segment = record["segments"][0]
    return sampled(record), segment["logprobs"][len(prompt) :], segment["turns"][0] | segment


def same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


def update(client: RawClient, path: Path, version: int, **fields: Any) -> dict[str, Any]:
    """Of prepare, if it is refused; else of commit."""
    prepared = client.call("prepare_weights", 60, update_id=f"u{version}", path=str(path), version=version, **fields)
    if prepared["type"] == "error":
        return prepared
    return client.call("commit_weights", 60, update_id=f"u{version}", version=version, mode="abort")


# 42: nothing of the old weights, neither ids nor KV, after an update.


def test_42_after_an_update_nothing_is_served_from_the_old_weights(
    served: WorkerThread, paths: dict[int, Path], fresh: Any
) -> None:
    with RawClient(served.address) as client:
        client.hello(timeout=30)
        same(reply(client), fresh[1][0])
        assert reply(client)[2]["cached_tokens"] == 48
        for version, number in ((1, 2), (2, 1), (3, 2)):
            assert update(client, paths[number], version)["type"] == "weights_committed"
            first = reply(client)
            same(first, fresh[number][0])
            assert first[2]["cached_tokens"] == 0
            assert first[2]["weight_versions"].tolist() == [[version, 8]]
            family = reply(client, FAMILY)
            same(family, fresh[number][1])
            assert family[2]["cached_tokens"] == 48
        status = client.call("status", 30)
        assert (status["weight_version"], status["engine"]["blocks_used"]) == (3, 0)


def test_42_a_conversation_over_an_update_goes_on_under_the_new_weights(
    served: WorkerThread, paths: dict[int, Path]
) -> None:
    """Between two turns of a trajectory the weights change: its KV is computed anew, its tokens say whose they are."""
    with RawClient(served.address) as client, RawClient(served.address) as trainer:
        client.hello(timeout=30)
        trainer.hello(timeout=30)
        talk = {"environment": {"name": "remote"}, "budget": {"on_length": "continue"}}
        asked = group(prompt=PROMPT, sampling={"temperature": 0.0}, **talk)
        client.call("submit", batch_id="b", groups=[asked])
        one = client.event("turn_done", 30)
        assert update(trainer, paths[2], 7)["type"] == "weights_committed"
        answer = {"turn": 0, "expected_len": one["total_len"], "observation": np.array([9] * 20, np.int32)}
        client.call("continue", trajectory_id="g.0", max_tokens=4, **answer)
        two = client.event("turn_done", 30)
        client.call("continue", trajectory_id="g.0", turn=1, expected_len=two["total_len"], done=True)
        segment = whole(client.record(30))["segments"][0]
    assert segment["weight_versions"].tolist() == [[0, 4], [7, 4]]
    for number, at in ((1, slice(64, 68)), (2, slice(88, 92))):
        logprobs = rigs.Reference(paths[number]).logprobs(segment["token_ids"].tolist())
        np.testing.assert_allclose(segment["logprobs"][at], logprobs[at], atol=1e-4)


# 44, 46, 49, 51: what is refused, and that nothing has changed then.


def tensors_of(model: rigs.RandModel, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return model.tensors() | {name.replace("__", "."): value for name, value in changed.items()}


def written(model: rigs.RandModel, **changed: torch.Tensor) -> Writer:
    return lambda path: rigs.write_checkpoint(path, model.config(), tensors_of(model, **changed))


def three_shards(harm: Callable[[Path, Path], object]) -> Writer:
    """Harm is done to the directory and its second shard."""

    def write(path: Path) -> Path:
        rigs.write_rand(path, W2, shards=3)
        harm(path, path / "model-00002-of-00003.safetensors")
        return path

    return write


def point_at_nothing(path: Path, _: Path) -> None:
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.weight"] = "model-00003-of-00003.safetensors"
    index.write_text(json.dumps(content))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
TIED = rigs.RandModel(seed=3, tied=True)
REFUSED: dict[str, tuple[Writer, str]] = {
    "44 transposed": (written(W2, model__layers__1__mlp__down_proj__weight=torch.zeros(128, 64)), "down_proj"),
    "44 hidden 96": (written(rigs.RandModel(hidden=96)), "96"),
    "44 a layer more": (written(rigs.RandModel(layers=3)), "model.layers.2."),
    "44 a layer less": (written(rigs.RandModel(layers=1)), "model.layers.1."),
    "44 the last tensor": (written(W2, lm_head__weight=torch.zeros(512, 63)), "lm_head.weight"),
    "44 another architecture": (written(rigs.RandModel("qwen2")), "bias"),
    "46 no second shard": (three_shards(lambda _, shard: shard.unlink()), "model-00002-of-00003.safetensors"),
    "46 a byte less": (three_shards(lambda _, shard: os.truncate(shard, shard.stat().st_size - 1)), "model-00002"),
    "46 half": (three_shards(lambda _, shard: os.truncate(shard, shard.stat().st_size // 2)), "model-00002"),
    "46 nothing": (three_shards(lambda _, shard: os.truncate(shard, 0)), "model-00002"),
    "46 a pointer": (three_shards(lambda _, shard: shard.write_text(POINTER)), "model-00002"),
    "46 a directory": (three_shards(lambda _, shard: (shard.unlink(), shard.mkdir())), "model-00002"),
    "46 a tensor of no shard": (three_shards(point_at_nothing), "model.layers.9.weight"),
    "46 no index": (three_shards(lambda path, _: (path / "model.safetensors.index.json").unlink()), "index"),
    "49 no head": (
        lambda path: rigs.write_checkpoint(
            path, W2.config(), {name: value for name, value in W2.tensors().items() if name != "lm_head.weight"}
        ),
        "lm_head.weight",
    ),
    "51 integers": (written(W2, model__norm__weight=torch.zeros(64, dtype=torch.int64)), "model.norm.weight"),
    "51 an infinity": (written(W2, model__norm__weight=torch.full((64,), torch.inf)), "model.norm.weight"),
    "51 not a number": (written(W2, lm_head__weight=torch.full((512, 64), torch.nan)), "lm_head.weight"),
}


def test_44_46_49_51_what_is_refused_leaves_the_old_weights_serving(
    served: WorkerThread, paths: dict[int, Path], fresh: Any, tmp_path: Path
) -> None:
    with unharmed(served.address, smoke=smoke_under_w2(paths)), RawClient(served.address) as client:
        client.hello(timeout=30)
        for version, (name, (write, word)) in enumerate(REFUSED.items(), start=1):
            error = update(client, write(tmp_path / name), version)["error"]
            assert error["code"] in ("weights_invalid", "weights_incomplete"), (name, error)
            assert word in f"{error['field']}: {error['message']}", (name, error)
            same(reply(client), fresh[1][0])
            status = client.call("status", 30)
            assert (status["weight_version"], status["state"]) == (0, "ready")
        # The cache of the old weights is still theirs, and the next good update works.
        assert reply(client)[2]["cached_tokens"] == 48
        assert update(client, paths[2], 99)["version"] == 99
        same(reply(client), fresh[2][0])


def smoke_under_w2(paths: dict[int, Path]) -> list[int]:
    return rigs.Reference(paths[2]).greedy([5, 6, 7], 4)


@pytest.mark.parametrize("name", [name for name in REFUSED if name.startswith(("46", "49", "51"))])
def test_46_at_the_start_the_same_files_end_the_command_before_it_is_ready(name: str, tmp_path: Path) -> None:
    write, word = REFUSED[name]
    with pytest.raises(StartError) as caught:
        load(parse(["--weights", str(write(tmp_path / "w")), "--kv-tokens", "1024"]))
    assert word in str(caught.value)


# 49: a tied head.


def test_49_a_tied_update_reaches_both_ends_and_another_head_is_refused(tmp_path: Path) -> None:
    other = rigs.RandModel(seed=4, tied=True)
    with real_worker(rigs.write_rand(tmp_path / "tied", TIED)) as served, RawClient(served.address) as client:
        client.hello(timeout=30)
        head = other.tensors()["model.embed_tokens.weight"].clone()
        wanted = rigs.Reference(rigs.write_rand(tmp_path / "other", other)).greedy(PROMPT, 8)
        old = reply(client)
        refused = update(client, written(other, lm_head__weight=head + 1)(tmp_path / "different"), 1)["error"]
        assert refused["field"] == "lm_head.weight"
        same(reply(client), old)
        for version, changed in enumerate(({}, {"lm_head__weight": head}), start=2):
            assert update(client, written(other, **changed)(tmp_path / f"{version}"), version)["version"] == version
            assert reply(client)[0] == wanted
            assert update(client, tmp_path / "tied", version + 10)["version"] == version + 10
            same(reply(client), old)
            assert update(client, tmp_path / "other", version, force=True)["version"] == version


# 51: the trainer saves another dtype than the worker's.


@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16])
def test_51_the_digest_and_the_tokens_are_those_of_the_values_in_the_workers_dtype(
    tmp_path: Path, source: torch.dtype
) -> None:
    path = rigs.write_rand(tmp_path / "m", rigs.RandModel(seed=5, std=0.1))
    rounded = {name: value.to(source) for name, value in load_file(path / "model.safetensors").items()}
    shutil.copytree(path, tmp_path / "source")
    save_file(rounded, tmp_path / "source" / "model.safetensors")
    shutil.copytree(path, tmp_path / "target")
    save_file({name: value.bfloat16() for name, value in rounded.items()}, tmp_path / "target" / "model.safetensors")
    with real_worker(path, dtype="bfloat16") as served, RawClient(served.address) as client:
        assert client.hello(timeout=30)["model"]["dtype"] == "bfloat16"
        digests, ids = set(), set()
        for version, name in enumerate(("source", "target"), start=1):
            digests.add(update(client, tmp_path / name, version)["digest"])
            ids.add(tuple(reply(client)[0]))
    assert len(digests) == len(ids) == 1


# 52: updates that meet each other, requests all the while.


def test_52_updates_of_two_trainers_while_requests_run(
    served: WorkerThread, paths: dict[int, Path], fresh: Any
) -> None:
    """Whoever is refused is told `weights_busy` or that its version is too old; what was acknowledged last serves."""
    acknowledged: list[int] = []
    codes: set[str] = set()

    def trainer(offset: int) -> None:
        with RawClient(served.address) as client:
            client.hello(timeout=30)
            for version in range(offset, 24, 2):
                answer = update(client, paths[1 + version % 2], version)
                if answer["type"] == "weights_committed":
                    acknowledged.append(answer["version"])
                else:
                    codes.add(answer["error"]["code"])

    trainers = [threading.Thread(target=trainer, args=(offset,)) for offset in (1, 2)]
    with RawClient(served.address) as client:
        client.hello(timeout=30)
        for thread in trainers:
            thread.start()
        answers = []
        while any(thread.is_alive() for thread in trainers) or not answers:
            asked = group(prompt=PROMPT, max_tokens=8, sampling={"temperature": 0.0})
            client.call("submit", 30, batch_id="b", groups=[asked])
            record = whole(client.record(30))
            client.event("batch_done", 30)
            if record["status"] == "truncated":
                answers.append((sampled(record), record["segments"][0]["weight_versions"].tolist()))
        for thread in trainers:
            thread.join()
        assert codes <= {"weights_busy", "bad_request", "stale_version", "weights_invalid"}
        assert acknowledged == sorted(acknowledged)
        status = client.call("status", 30)
        assert (status["weight_version"], status["state"]) == (max(acknowledged), "ready")
        # Whoever looks at one version sees one set of weights.
        for ids, versions in answers:
            if len(versions) == 1:
                version = versions[0][0]
                assert ids == fresh[1 if version == 0 else 1 + version % 2][0][0]
        assert update(client, paths[1], 1000)["version"] == 1000
        same(reply(client), fresh[1][0])

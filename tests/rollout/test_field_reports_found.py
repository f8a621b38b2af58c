"""Faults of others' engines, trainers and queues that we went looking for in their public threads, tried on our worker.

A test's name begins with the repository and the number of the thread.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import torch
import zmq
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from tests import rigs
from tests.rollout.raw_client import RawClient, group, pack
from tests.rollout.real_worker import real_worker
from tests.rollout.timed_engine import TimedEngine, reply_ids
from tests.rollout.unharmed import sampled, unharmed, whole
from tests.rollout.workers import WorkerProcess, WorkerThread, eventually, worker

VOCAB = 64
RAND = rigs.RandModel(seed=9)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rigs.write_rand(tmp_path_factory.mktemp("rand") / "w", RAND)


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[WorkerThread]:
    with real_worker(checkpoint, max_context=256) as thread:
        yield thread


@pytest.fixture
def client(served: WorkerThread) -> Iterator[RawClient]:
    """A client of a worker that must be unharmed afterwards, and whose neighbour must not notice anything."""
    with unharmed(served.address), RawClient(served.address) as one, RawClient(served.address) as other:
        other.hello(timeout=30)
        neighbour = group("neighbour", max_tokens=200, sampling={"seed": 5})
        other.call("submit", 30, batch_id="n", groups=[neighbour])
        one.hello(timeout=30)
        yield one
        record = whole(other.record(60))
        assert len(sampled(record)) == 200


def records(client: RawClient, *groups: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.call("submit", 30, batch_id="b", groups=list(groups))
    assert reply["type"] == "accepted", reply
    found = [whole(client.record(60)) for one in groups for _ in one["trajectory_ids"]]
    client.event("batch_done", 30)
    return sorted(found, key=lambda record: str(record["trajectory_id"]))


def refusal(client: RawClient, **fields: Any) -> dict[str, Any]:
    error: dict[str, Any] = client.call("submit", 30, batch_id="b", groups=[group(**fields)])["error"]
    return error


# Numbers that do not fit.


def test_vllm_57018_seeds_of_64_bits_are_seeds_and_larger_ones_are_refused(client: RawClient) -> None:
    seeds = (0, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
    asked = [group(f"s{seed}", max_tokens=12, sampling={"seed": seed}) for seed in seeds]
    first, again = (records(client, *asked) for _ in range(2))
    assert len({tuple(sampled(record)) for record in first}) == len(seeds)
    assert [sampled(record) for record in first] == [sampled(record) for record in again]
    assert {record["sampling"]["seed"] for record in first} == set(seeds)
    for seed in (-1, -(2**63)):
        assert refusal(client, sampling={"seed": seed})["field"] == "groups[0].sampling.seed"
    # 2**64 has no msgpack integer: the nearest that can be sent are a float and a text.
    for odd in (float(2**64), "18446744073709551616"):
        assert refusal(client, sampling={"seed": odd})["field"] == "groups[0].sampling.seed"


def test_sglang_17788_a_top_k_beyond_the_vocabulary_keeps_all(client: RawClient) -> None:
    plain, *others = records(
        client,
        group("a", max_tokens=8, sampling={"seed": 3}),
        *(group(f"k{k}", max_tokens=8, sampling={"seed": 3, "top_k": k}) for k in (512, 513, 10**6, 2**31 - 1)),
    )
    assert {tuple(sampled(record)) for record in others} == {tuple(sampled(plain))}
    for k in (-1, 2**31, 2**62):
        assert refusal(client, sampling={"top_k": k})["field"] == "groups[0].sampling.top_k"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("repetition_penalty", (0.0, -1.0, 1e-300, 1e-39, 1e39, float("inf"), float("nan"))),
        ("presence_penalty", (1e39, -1e39, 1e300, float("inf"), float("nan"))),
        ("frequency_penalty", (1e39, -1e300, float("-inf"), float("nan"))),
    ],
)
def test_sglang_24874_penalties_that_would_divide_by_zero_or_overflow_are_refused(
    client: RawClient, field: str, values: tuple[float, ...]
) -> None:
    for value in values:
        error = refusal(client, sampling={field: value})
        assert (error["code"], error["field"]) == ("bad_request", f"groups[0].sampling.{field}"), value
        score = client.call("score", 30, sequences=[np.array([1, 2], np.int32)], sampling={field: value})["error"]
        assert score["field"] == f"sampling.{field}"
    extreme = {"repetition_penalty": 1e30, "presence_penalty": 1e38, "frequency_penalty": -1e30}
    (record,) = records(client, group(max_tokens=4, sampling={field: extreme[field]}))
    assert (record["status"], len(sampled(record))) == ("truncated", 4)


def test_vllm_16529_ids_out_of_the_vocabulary_are_refused_wherever_they_stand(client: RawClient) -> None:
    bad = np.array([1, 512], np.int32)
    for field, sampling in (
        ("bias_ids", {"bias_ids": bad, "bias_values": np.zeros(2, np.float32)}),
        ("allowed_ids", {"allowed_ids": bad}),
        ("allowed_ids", {"allowed_ids": np.array([-1], np.int32)}),
        ("stop_ids", {"stop_ids": [512]}),
    ):
        error = refusal(client, sampling=sampling)
        assert error["code"] == "bad_request"
        assert error["field"].startswith(f"groups[0].sampling.{field}")
    script = {"script": [{"observation": bad}]}
    assert refusal(client, environment=script)["field"].startswith("groups[0].environment.script[0].observation")
    talk = {"environment": {"name": "remote"}, "budget": {"on_length": "continue"}}
    client.call("submit", 30, batch_id="r", groups=[group("r", **talk)])
    turn = client.event("turn_done", 30)
    answer = {"trajectory_id": "r.0", "turn": 0, "expected_len": turn["total_len"]}
    assert client.call("continue", observation=bad, **answer)["error"]["field"].startswith("observation")
    assert client.call("continue", done=True, **answer)["type"] == "ok"
    assert client.record(30)["status"] == "completed"
    # The last one that there is may stand anywhere.
    edge = np.array([511], np.int32)
    law = {"allowed_ids": edge, "bias_ids": edge, "bias_values": np.ones(1, np.float32), "stop_ids": [511]}
    (record,) = records(client, group(sampling=law))
    assert sampled(record) == [511]


def test_vllm_3341_fields_of_another_type_cost_one_refusal_each(client: RawClient) -> None:
    for field, values in {
        "top_k": (0.01, "5", True, [], None),
        "temperature": ("1", None, {}, True),
        "max_tokens": (1.5, "3", False),
        "seed": (1.0, "x", True),
        "stop": ("text", [7], [b"x"]),
        "stop_ids": ([1.5], ["1"], 7),
        "logprobs": ("processed", ["other"], []),
    }.items():
        for value in values:
            error = refusal(client, max_tokens=None, sampling={"max_tokens": 4} | {field: value})
            assert error["code"] == "bad_request"
            assert error["field"].startswith(f"groups[0].sampling.{field}"), (field, value, error)


# Logprobs that are infinite, and arrays of nothing.


def test_vllm_10234_prompt_tokens_that_the_law_excludes_score_minus_infinity(client: RawClient) -> None:
    law = {"top_k": 1, "prompt_logprobs": True, "top_logprobs": 4, "logprobs": ["processed", "raw"]}
    (record,) = records(client, group(prompt=[1, 2, 3, 4, 5, 6], max_tokens=3, sampling=law))
    segment = record["segments"][0]
    scores = segment["prompt_logprobs"]
    scores = scores["processed"] if isinstance(scores, dict) else scores
    assert np.isneginf(np.asarray(scores)[1:]).any()
    assert not np.isnan(np.asarray(scores)[1:]).any()
    assert segment["logprobs"][-3:].tolist() == [0.0, 0.0, 0.0]
    sequence = np.array([1, 2, 3, 4, 5, 6], np.int32)
    scored = client.call("score", 30, sequences=[sequence], sampling={"allowed_ids": np.array([2, 4], np.int32)})
    found = scored["logprobs"]["processed"][0]
    assert np.isneginf(found[[2, 4, 5]]).all()
    assert np.isfinite(found[[1, 3]]).all()


def test_verl_7534_arrays_without_elements_travel_and_mean_nothing(client: RawClient) -> None:
    nothing = np.zeros(0, np.int32)
    script = {"script": [{"glue": nothing, "observation": nothing}, {"observation": nothing}]}
    (record,) = records(client, group(max_tokens=2, environment=script))
    assert len(record["segments"][0]["token_ids"]) == 3 + 3 * 2
    talk = {"environment": {"name": "remote"}, "budget": {"on_length": "continue"}}
    client.call("submit", 30, batch_id="r", groups=[group("r", max_tokens=2, **talk)])
    turn = client.event("turn_done", 30)
    answer = {"trajectory_id": "r.0", "turn": 0, "expected_len": turn["total_len"]}
    assert client.call("continue", observation=nothing, glue=nothing, **answer)["type"] == "ok"
    turn = client.event("turn_done", 30)
    client.call("continue", trajectory_id="r.0", turn=1, expected_len=turn["total_len"], done=True)
    assert len(whole(client.record(30))["segments"][0]["token_ids"]) == 7
    assert refusal(client, prompt=nothing)["field"] == "groups[0].prompt"
    assert refusal(client, sampling={"allowed_ids": nothing})["field"] == "groups[0].sampling.allowed_ids"
    assert client.call("score", sequences=[nothing])["error"]["field"] == "sequences[0]"
    unbiased = {"bias_ids": nothing, "bias_values": np.zeros(0, np.float32), "seed": 4}
    with_none, without = records(
        client, group("a", max_tokens=6, sampling=unbiased), group("b", max_tokens=6, sampling={"seed": 4})
    )
    assert sampled(with_none) == sampled(without)


# Text that is none.


def test_rapid_mlx_730_text_that_is_no_unicode_costs_one_refusal(client: RawClient) -> None:
    """A lone surrogate, a cut character and a stray byte, as the texts of a message."""
    for text in (b"\xed\xa0\x80", b"caf\xc3", b"\xff", b"\xf5\x80\x80\x80"):
        good = msgpack.packb(
            {"type": "cancel", "id": "x", "protocol": 1, "trajectory_ids": ["MARK"]}, use_bin_type=True
        )
        hostile = good.replace(b"\xa4MARK", bytes([0xA0 | len(text)]) + text)
        client.socket.send(hostile)
        error = client.wait(lambda message: message["type"] == "error", 10)["error"]
        assert error["code"] == "bad_request"
    names = ("\u0000", "\u202e", "é" * 60, "🧬", "a\nb")
    (*found,) = records(client, *(group(name) for name in names))
    assert {record["group_id"] for record in found} == set(names)


def byte_level_speller(path: Path, text: str) -> None:
    """A TABLE checkpoint whose greedy reply to id 300 spells `text` with a token for each byte, then repeats."""
    alphabet = sorted(ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    data = text.encode()
    shown = [piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)]
    ids = [vocabulary[character] for character in "".join(shown)]
    assert len(ids) == len(data) == len(set(ids)), "each byte once, so that the last token says what follows"
    rows, state_of = rigs.script(320, list(zip([300, *ids], [*ids, ids[0]], strict=True)))
    rigs.write_table(path, rows, state_of)
    tokenizer = Tokenizer(models.BPE(vocabulary | {f"<{i}>": i for i in range(256, 320)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))


def test_transformers_46519_stop_strings_match_in_bytes_and_not_in_whole_characters(tmp_path: Path) -> None:
    text = "x🧬中y"
    byte_level_speller(tmp_path, text)
    with real_worker(tmp_path) as served, unharmed(served.address), RawClient(served.address) as client:
        client.hello(timeout=30)
        for stop, length in (("🧬", 5), ("中", 8), ("🧬中", 8), ("x🧬", 5), ("y", 9), ("中yx", 10), ("中🧬", None)):
            law = {"temperature": 0.0, "stop": [stop]}
            (record,) = records(client, group(prompt=[300], max_tokens=12, sampling=law))
            turn = record["segments"][0]["turns"][0]
            if length is None:
                assert (turn["finish_reason"], turn["stop"]) == ("length", None)
            else:
                assert (len(sampled(record)), turn["finish_reason"], turn["stop"]) == (length, "stop", stop)


# Checkpoints as trainers and hubs leave them.


def committed(client: RawClient, path: Path, version: int) -> dict[str, Any]:
    prepared = client.call("prepare_weights", 60, update_id=f"u{version}", path=str(path), version=version)
    if prepared["type"] == "error":
        return prepared
    return client.call("commit_weights", 60, update_id=f"u{version}", version=version, mode="abort")


def greedy(client: RawClient) -> list[int]:
    (record,) = records(client, group(prompt=range(20), max_tokens=8, sampling={"temperature": 0.0}))
    return sampled(record)


@pytest.fixture
def trainer(checkpoint: Path) -> Iterator[RawClient]:
    """Of a worker of its own, since these change weights."""
    with real_worker(checkpoint, max_context=256) as thread, RawClient(thread.address) as one:
        one.hello(timeout=30)
        yield one
        status = one.call("status", 30)
        assert (status["state"], status["engine"]["blocks_used"]) == ("ready", 0)


def test_unsloth_6200_an_fp8_checkpoint_is_refused_by_name_and_not_read_without_its_scales(
    trainer: RawClient, checkpoint: Path, tmp_path: Path
) -> None:
    before = greedy(trainer)
    tensors = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    scale = torch.ones(1)
    cases: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "values": ({name: tensors[name].to(torch.float8_e4m3fn)}, name),
        "values and scales": ({name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}, name),
        "scales": ({f"{name}_scale_inv": scale}, f"{name}_scale_inv"),
        "int8": ({name: tensors[name].to(torch.int8)}, name),
    }
    for version, (case, (changed, field)) in enumerate(cases.items(), start=1):
        path = rigs.write_checkpoint(tmp_path / case, RAND.config(), tensors | changed)
        error = committed(trainer, path, version)["error"]
        assert error["code"].startswith("weights_")
        assert field in f"{error['field']} {error['message']}", (case, error)
    assert greedy(trainer) == before
    quantised = RAND.config() | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    error = committed(trainer, rigs.write_checkpoint(tmp_path / "config", quantised, tensors), 9)["error"]
    assert "quantization_config" in f"{error['field']} {error['message']}"


def test_sglang_14745_a_config_of_the_newer_form_means_the_same(trainer: RawClient, tmp_path: Path) -> None:
    """transformers 5 moved rope_theta into rope_parameters and says dtype for torch_dtype."""
    config = RAND.config()
    theta = config.pop("rope_theta")
    config.pop("rope_scaling")
    config["dtype"] = config.pop("torch_dtype")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    before = greedy(trainer)
    path = rigs.write_checkpoint(tmp_path / "newer", config, RAND.tensors())
    assert committed(trainer, path, 1)["type"] == "weights_committed"
    assert greedy(trainer) == before
    with real_worker(path) as thread, RawClient(thread.address) as client:
        client.hello(timeout=30)
        assert greedy(client) == before
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    error = committed(trainer, rigs.write_checkpoint(tmp_path / "other", config, RAND.tensors()), 2)["error"]
    assert "rope_theta" in f"{error['field']} {error['message']}"


def test_prime_rl_1857_a_checkpoint_deleted_too_early_costs_no_more_than_its_update(
    trainer: RawClient, checkpoint: Path, tmp_path: Path
) -> None:
    other = rigs.RandModel(seed=10)
    path = rigs.write_rand(tmp_path / "gone", other, shards=3)
    before = greedy(trainer)
    wanted = rigs.Reference(path).greedy(list(range(20)), 8)
    # After prepare nothing of it is needed any more.
    trainer.call("prepare_weights", 60, update_id="a", path=str(path), version=1)
    shutil.rmtree(path)
    assert trainer.call("commit_weights", 60, update_id="a", version=1, mode="abort")["version"] == 1
    assert greedy(trainer) == wanted
    # Before: refused, the old weights serve on, and the next update is not in anybody's way.
    assert committed(trainer, path, 2)["error"]["code"] == "weights_incomplete"
    # During: one or the other, never a mixture.
    for version in range(3, 9):
        rigs.write_rand(path, RAND, shards=3)
        request = trainer.send("prepare_weights", update_id=f"u{version}", path=str(path), version=version)
        time.sleep((version - 3) * 0.004)
        shutil.rmtree(path)
        if trainer.reply(request, 60)["type"] == "weights_prepared":
            assert trainer.call("commit_weights", 60, update_id=f"u{version}", version=version, mode="abort")["version"]
            wanted = before
        assert greedy(trainer) == wanted
    assert committed(trainer, checkpoint, 10)["version"] == 10
    assert greedy(trainer) == before


def test_vllm_54230_a_tensor_the_index_places_elsewhere_is_refused(trainer: RawClient, tmp_path: Path) -> None:
    """A shard may hold stale tensors that the index assigns to another file; read, they would win by file order."""
    path = rigs.write_rand(tmp_path / "w", rigs.RandModel(seed=10), shards=3)
    before = greedy(trainer)
    last = path / "model-00003-of-00003.safetensors"
    tensors = load_file(last)
    save_file(tensors | {"model.embed_tokens.weight": torch.zeros(512, 64)}, last, {"format": "pt"})
    error = committed(trainer, path, 1)["error"]
    assert "model.embed_tokens.weight" in f"{error['field']} {error['message']}"
    assert greedy(trainer) == before
    # A leftover beside the shards, which the index does not name, is not looked at.
    save_file(tensors, last, {"format": "pt"})
    save_file({"model.embed_tokens.weight": torch.zeros(512, 64)}, path / "adapter_model.safetensors")
    (path / "optimizer.pt").write_bytes(b"\x80\x04")
    assert committed(trainer, path, 2)["type"] == "weights_committed"
    assert greedy(trainer) == rigs.Reference(path).greedy(list(range(20)), 8)


def with_metadata(file: Path, metadata: Any, absent: bool = False) -> None:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    if not absent:
        header = {"__metadata__": metadata, **header}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_safetensors_823_metadata_may_be_empty_foreign_or_missing(trainer: RawClient, tmp_path: Path) -> None:
    other = rigs.RandModel(seed=10)
    wanted = rigs.Reference(rigs.write_rand(tmp_path / "plain", other)).greedy(list(range(20)), 8)
    for version, metadata in enumerate(({}, {"format": "mlx"}, {"format": "pt", "é": "x" * 5000}, None), start=1):
        path = rigs.write_rand(tmp_path / f"{version}", other)
        with_metadata(path / "model.safetensors", metadata, absent=metadata is None)
        assert committed(trainer, path, version)["type"] == "weights_committed", metadata
        assert greedy(trainer) == wanted


def test_tensorrt_edge_llm_195_a_checkpoint_of_symbolic_links_is_a_checkpoint(
    trainer: RawClient, tmp_path: Path
) -> None:
    """As a hub's cache keeps them; and a link `latest` that moves on between prepare and commit."""
    expected = {}
    for seed in (10, 11):
        blobs, snapshot = tmp_path / f"blobs{seed}", tmp_path / "snapshots" / f"{seed}"
        rigs.write_rand(blobs, rigs.RandModel(seed=seed), shards=2)
        snapshot.mkdir(parents=True)
        for number, file in enumerate(sorted(blobs.iterdir())):
            moved = file.rename(blobs / f"{number:064x}")
            (snapshot / file.name).symlink_to(os.path.relpath(moved, snapshot))
        expected[seed] = rigs.Reference(snapshot).greedy(list(range(20)), 8)
    latest = tmp_path / "latest"
    latest.symlink_to(tmp_path / "snapshots" / "10")
    trainer.call("prepare_weights", 60, update_id="a", path=str(latest), version=1)
    latest.unlink()
    latest.symlink_to(tmp_path / "snapshots" / "11")
    assert trainer.call("commit_weights", 60, update_id="a", version=1, mode="abort")["version"] == 1
    assert greedy(trainer) == expected[10]
    assert committed(trainer, latest, 2)["version"] == 2
    assert greedy(trainer) == expected[11]
    latest.unlink()
    latest.symlink_to(tmp_path / "nowhere")
    assert committed(trainer, latest, 3)["error"]["code"] == "weights_incomplete"
    latest.unlink()
    latest.symlink_to(latest)
    assert committed(trainer, latest, 4)["error"]["code"] == "weights_incomplete"


# More than there is room for.


def test_vllm_35541_what_can_never_fit_is_refused_and_what_fits_alone_waits_its_turn(checkpoint: Path) -> None:
    """49 blocks; prompts that would need more are refused at once, forty that need thirteen each all end."""
    with (
        real_worker(checkpoint, kv_tokens=48 * 16, max_running=16) as served,
        RawClient(served.address) as client,
        unharmed(served.address, timeout=60),
    ):
        limit = client.hello(timeout=30)["model"]["max_context"]
        assert refusal(client, prompt=np.arange(limit) % 500, max_tokens=1)["code"] == "prompt_too_long"
        rng = np.random.default_rng(3)
        asked = [
            group(f"g{i}", prompt=rng.integers(0, 500, 180), max_tokens=20, sampling={"seed": i}) for i in range(40)
        ]
        assert {len(sampled(record)) for record in records(client, *asked)} == {20}
        filling = group("fill", prompt=rng.integers(0, 500, limit - 1), max_tokens=50)
        (record,) = records(client, filling)
        assert (len(sampled(record)), record["finish_reason"]) == (1, "context_overflow")


def test_vllm_6646_a_group_of_far_more_samples_than_slots_ends(client: RawClient) -> None:
    found = records(client, group(n=300, max_tokens=3, sampling={"seed": 1}))
    assert len(found) == 300
    assert len({tuple(sampled(record)) for record in found}) > 150


# Queues and processes.


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def storm(address: str, count: int, hello: bool) -> None:
    context = zmq.Context()
    for i in range(count):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        if hello:
            socket.send_multipart(pack({"type": "hello", "id": f"{i}", "protocol": 1, "client": f"{i}"}))
            assert socket.poll(10_000)
            socket.recv_multipart()
        socket.close()
    context.term()


def test_libzmq_2020_clients_that_come_and_go_leave_nothing_behind() -> None:
    from rollout.service.service import Timeouts

    timeouts = Timeouts(client=0.2, drain=1.0, ack=1.0)
    with worker(TimedEngine(), timeouts=timeouts) as served, unharmed(served.address):

        def forgotten() -> bool:
            return bool(served.call(lambda service: len(service.sessions)) == 1)

        storm(served.address, 150, hello=True)
        storm(served.address, 150, hello=False)
        eventually(forgotten, 30)
        before = rss()
        for _ in range(3):
            storm(served.address, 150, hello=True)
            eventually(forgotten, 30)
        assert rss() - before < 20 * 2**20


@pytest.mark.stress
def test_libzmq_3176_a_client_that_asks_and_never_reads_fills_no_memory(tmp_path: Path) -> None:
    process = WorkerProcess("tests.rollout.stub_worker", folder=tmp_path)
    try:
        process.wait_ready()
        memory = psutil.Process(process.process.pid).memory_info
        with unharmed(process.address, pid=process.process.pid, log=lambda: process.log), zmq.Context() as context:
            deaf = context.socket(zmq.DEALER)
            deaf.linger, deaf.sndhwm, deaf.rcvhwm = 0, 0, 1
            deaf.connect(process.address)
            before = memory().rss
            for _ in range(50_000):
                deaf.send(DEAF)
            with RawClient(process.address) as other:
                other.hello(timeout=30)
                eventually(lambda: other.call("status", 30)["wire"]["undeliverable"] > 5_000, 120)
            # 32,768 refusals of a few hundred bytes each, and what the system keeps for a connection.
            assert memory().rss - before < 60 * 2**20
            deaf.close()
    finally:
        process.kill()


DEAF = b"".join(pack({"type": "cancel", "id": "x" * 100, "protocol": 1}))


def test_pyzmq_1642_without_file_descriptors_the_clients_there_are_served_on(tmp_path: Path) -> None:
    """Newcomers wait in the listen queue and are served once others have left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = WorkerProcess("tests.rollout.stub_worker", folder=tmp_path)
    try:
        process.wait_ready()
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (64, hard))
        with RawClient(process.address) as first:
            first.hello()
            context = zmq.Context()
            crowd = []
            for _ in range(80):
                socket = context.socket(zmq.DEALER)
                socket.setsockopt(zmq.LINGER, 0)
                socket.connect(process.address)
                crowd.append(socket)
            for i in range(20):
                (record,) = records(first, group(f"g{i}"))
                assert sampled(record) == reply_ids(3, 4).tolist()
            late = RawClient(process.address)
            with pytest.raises(TimeoutError):
                late.hello(timeout=0.5)
            for socket in crowd:
                socket.close()
            context.term()
            assert late.hello(timeout=20)["type"] == "welcome"
            (record,) = records(late, group("late"))
            late.close()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
    assert soft > 64


def test_pyzmq_1642_the_limit_of_file_descriptors_is_lifted_at_the_start(tmp_path: Path) -> None:
    """Where a shell allows 256 of them, three hundred clients connect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        process = WorkerProcess("tests.rollout.stub_worker", folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    context = zmq.Context()
    try:
        process.wait_ready()
        crowd = [context.socket(zmq.DEALER) for _ in range(300)]
        for i, socket in enumerate(crowd):
            socket.linger = 0
            socket.connect(process.address)
            socket.send_multipart(pack({"type": "hello", "id": f"{i}", "protocol": 1, "client": f"{i}"}))
        for socket in crowd:
            assert socket.poll(20_000)
            socket.close()
    finally:
        context.term()
        process.kill()


def test_vllm_55510_a_killed_worker_takes_its_engine_along(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--weights", str(checkpoint), "--engine-process", "process", "--kv-tokens", "2048", "--device", "cpu")
    process = WorkerProcess("rollout", *arguments, folder=tmp_path)
    try:
        with RawClient(process.wait_ready(120).address) as client:
            client.hello(timeout=30)
            client.call("submit", 30, batch_id="b", groups=[group(max_tokens=1500)])
            children = psutil.Process(process.process.pid).children(recursive=True)
            assert children
            os.kill(process.process.pid, signal.SIGKILL)
            eventually(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), 10)
    finally:
        process.kill()


def test_sglang_22247_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards by a day and forwards by a year, while work runs, clients are silent and deadlines are set."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])
    with worker(TimedEngine(0.01)) as served, unharmed(served.address), RawClient(served.address) as client:
        client.hello()
        budget = {"trajectory_deadline_s": 20.0, "turn_deadline_s": 20.0}
        for jump in (-86_400.0, 3e7, 0.0):
            client.call("submit", batch_id="b", groups=[group(max_tokens=30, budget=budget)])
            shift[0] = jump
            record = whole(client.record(10))
            client.event("batch_done")
            assert record["finish_reason"] == "length"
            times = record["times"]
            assert all(0 <= seconds < 5 for seconds in times.values()), times


def test_a_thousand_of_them_at_once_are_one_fault_each(client: RawClient) -> None:
    """All the refusals of this file in one burst: one error each, in order, and the neighbour does not notice."""
    bad: list[Callable[[], dict[str, Any]]] = [
        lambda: group(sampling={"seed": -1}),
        lambda: group(sampling={"top_k": 2**40}),
        lambda: group(sampling={"repetition_penalty": 1e-300}),
        lambda: group(prompt=[512]),
        lambda: group(sampling={"stop_ids": [512]}),
    ]
    sent = [client.send("submit", batch_id=f"b{i}", groups=[bad[i % len(bad)]()]) for i in range(500)]
    for name in sent:
        assert client.reply(name, 30)["error"]["code"] == "bad_request"
    assert threading.active_count() < 50

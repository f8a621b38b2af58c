from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zmq
import zmq.auth

from rollout.command.cli import build_parser, parse
from rollout.command.config import WorkerConfig, parse_bytes
from rollout.command.load import load
from rollout.command.start import StartError, run_worker, write_ready_file
from rollout.local import local_worker
from rollout.wire.curve import is_local
from tests import rigs
from tests.rollout.chat.tiny import THINKING, ordinary
from tests.rollout.raw_client import RawClient, group
from tests.rollout.wire.test_channel import channel
from tests.rollout.workers import ROOT, WorkerProcess

# Options.


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_every_option_is_in_the_help_in_a_group_with_its_default_and_unit() -> None:
    text = " ".join(build_parser().format_help().split())
    for name, field in WorkerConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert str(field.description).split(";")[0] in text
    for title in ("model:", "engine:", "address:", "clients:", "environments:", "shutdown:"):
        assert title in text
    assert "running work may go on after SIGTERM (s, default 30)" in text
    assert "(bytes, or 2GiB, default 2GiB)" in text
    assert "(default tcp://127.0.0.1:5555)" in text
    assert "share the KV of equal prefixes (default on)" in text


def test_options_reach_the_configuration() -> None:
    config = parse(
        [
            "--weights",
            "w",
            "--kv-memory",
            "1.5GiB",
            "--max-running",
            "8",
            "--no-overlap",
            "--env",
            "a=b:C",
            "--env",
            "d=e:F",
        ]
    )
    assert config.weights == Path("w")
    assert config.kv_memory == 3 * 2**29
    assert (config.max_running, config.overlap, config.env) == (8, False, ("a=b:C", "d=e:F"))
    assert config.prefix_cache
    assert config.limits.window_bytes == 2 * 2**20


def test_the_environment_fills_in_what_the_command_line_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_WEIGHTS", "/from/environment")
    monkeypatch.setenv("ROLLOUT_WORKER_KV_MEMORY", "2M")
    monkeypatch.setenv("ROLLOUT_WORKER_MAX_RUNNING", "3")
    config = parse(["--max-running", "4"])
    assert (config.weights, config.kv_memory, config.max_running) == (Path("/from/environment"), 2**21, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--weights is required"),
        (["--weights", "w", "--max-running", "0"], "--max-running: should be greater than 0"),
        (["--weights", "w", "--max-running", "many"], "--max-running: should be a valid integer, not 'many'"),
        (["--weights", "w", "--drain-timeout", "nan"], "--drain-timeout: should be"),
        (["--weights", "w", "--kv-memory", "much"], "--kv-memory: 'much' is no size"),
        (["--weights", "w", "--result-memory", "8388608T"], "--result-memory: should be less than"),
        (["--weights", "w", "--kv-memory", "1G", "--kv-tokens", "5"], "give one of them"),
        (["--weights", "w", "--dtype", "int8"], "argument --dtype: invalid choice"),
        (["--weights", "w", "--bind", "tcp://0.0.0.0:5555"], "can be reached from other machines"),
        (["--weights", "w", "--bind", "tcp://*:5555"], "--curve-secret"),
        (
            ["--weights", "w", "--bind", "localhost:5555"],
            "--bind: 'localhost:5555' must read tcp://HOST:PORT or ipc://PATH",
        ),
        (["--weights", "w", "--curve-clients", "d"], "--curve-clients needs --curve-secret"),
        (["--weights", "w", "--max-step-tokens", "8", "--max-running", "9"], "must be at least --max-running 9"),
        (["--weights", "w", "--surprise"], "unrecognized arguments: --surprise"),
        (["--weights", "w", "--max-run", "3"], "unrecognized arguments: --max-run"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(arguments, capsys)
    assert message in error
    assert "Traceback" not in error


def test_a_wrong_environment_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_MAX_RUNNING", "many")
    assert "ROLLOUT_WORKER_MAX_RUNNING: should be a valid integer" in refused(["--weights", "w"], capsys)


@pytest.mark.parametrize(
    ("text", "size"), [("17", 17), ("1K", 1024), ("1kB", 1024), ("512M", 2**29), ("2GiB", 2**31), ("0.5 G", 2**29)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "1X", "-1", "1GG", "1 2", "2.7", "2.0B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://127.1.2.3:1", True),
        ("tcp://localhost:5555", True),
        ("tcp://[::1]:5555", True),
        ("ipc:///tmp/worker", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://10.0.0.7:5555", False),
        ("tcp://[::]:5555", False),
        ("tcp://eth0:5555", False),
        ("tcp://127.example.org:5555", False),
    ],
)
def test_which_addresses_stay_on_this_machine(address: str, local: bool) -> None:
    assert is_local(address) is local


# Start.


def test_the_ready_file_is_whole_or_not_there(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    write_ready_file(file, address="tcp://127.0.0.1:7", boot_id="b")
    assert json.loads(file.read_text()) == {"address": "tcp://127.0.0.1:7", "pid": os.getpid(), "boot_id": "b"}
    assert list(tmp_path.iterdir()) == [file]


# The command.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rigs.write_rand(tmp_path_factory.mktemp("rand"))


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollout", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_the_command_serves_a_checkpoint_and_says_when_it_is_ready(checkpoint: Path, tmp_path: Path) -> None:
    arguments = ("--weights", str(checkpoint), "--max-running", "8", "--weight-version", "7", "--kv-tokens", "1000")
    worker = WorkerProcess("rollout", *arguments, folder=tmp_path)
    try:
        with RawClient(worker.wait_ready(120).address) as client:
            welcome = client.hello(timeout=30)
            assert (welcome["model"]["vocab_size"], welcome["weight_version"]) == (512, 7)
            # A trajectory must fit into the cache, even where the checkpoint could take a longer one.
            assert welcome["model"]["max_context"] == 1008
            client.call("submit", batch_id="b", groups=[group(n=2, max_tokens=5, sampling={"temperature": 0.0})])
            first, second = (client.record(30)["segments"][0] for _ in range(2))
            np.testing.assert_array_equal(first["token_ids"], second["token_ids"])
            assert first["weight_versions"].tolist() == [[7, 5]]
            scored = client.call("score", sequences=[first["token_ids"]], sampling={"temperature": 0.0}, timeout=30)
            np.testing.assert_allclose(scored["logprobs"]["processed"][0][3:], first["logprobs"][3:], atol=1e-4)
        log = worker.log
        for line in (
            "model    ",
            "weights  version 7, sha256:",
            "KV cache 1008 tokens",
            f"ready address={worker.address}",
        ):
            assert line in log
    finally:
        worker.process.terminate()
        code = worker.wait()
        worker.kill()
    assert code == 0


def test_json_logs_are_objects_from_the_first_line_to_the_last_the_engine_process_s_too(
    checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ("--weights", str(checkpoint), "--max-running", "8", "--kv-tokens", "1000", "--log-format", "json")
    worker = WorkerProcess("rollout", *arguments, "--engine-process", "process", folder=tmp_path)
    try:
        worker.wait_ready(120)
        worker.process.terminate()
        assert worker.wait() == 0
        lines = [json.loads(line) for line in worker.log.splitlines()]
    finally:
        worker.kill()
    assert {"engine.handles.child", "engine.start.progress", "rollout.command.start"} <= {
        line["logger"] for line in lines
    }
    (ready,) = [line["fields"] for line in lines if line["message"] == "ready"]
    assert (ready["address"], ready["KV cache"].split()[0]) == (worker.address, "1008")
    assert sum(size for tag, size in ready["memory"]["cpu"].items() if tag == "kv pool") == 64 * 16384
    assert 0 < ready["seconds"] < 120


def test_environments_are_found_in_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text(
        "from rollout.environments.base import Environment, Step\n"
        "class Once(Environment):\n"
        "    on_length = 'continue'\n"
        "    async def step(self, turn):\n"
        "        return Step(done=True, reward=0.5)\n"
    )
    arguments = ("--env", "once=here:Once")
    worker = WorkerProcess("tests.rollout.stub_worker", *arguments, folder=tmp_path, elsewhere=True)
    try:
        with RawClient(worker.wait_ready().address) as client:
            assert "once" in client.hello()["environments"]
            client.call("submit", batch_id="b", groups=[group(environment={"name": "once"})])
            assert client.record()["segments"][0]["turns"][0]["reward"] == 0.5
    finally:
        worker.kill()


def test_a_taken_address_ends_the_command_before_it_loads_anything(checkpoint: Path) -> None:
    taken = channel("tcp://127.0.0.1:0")
    done = command("--weights", str(checkpoint), "--bind", taken.address)
    taken.close(0.0)
    assert done.returncode == 1
    assert f"rollout-worker: {taken.address} is in use" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (["--weights", "/no/such/folder"], "/no/such/folder"),
        (["--env", "x=no.such.module:Class"], "x=no.such.module:Class"),
        (["--max-context", "5000"], "max_context 5000 is above the checkpoint's 4096 positions"),
        (["--kv-memory", "10"], "at least 2 are needed"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(fault: list[str], message: str, checkpoint: Path) -> None:
    with pytest.raises(StartError) as caught:
        load(parse(["--weights", str(checkpoint), *fault]))
    assert message in str(caught.value)


def test_a_plug_in_that_appends_what_the_template_does_not_write_ends_the_start(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "with a template")
    (folder / "tokenizer.json").write_text(ordinary().to_str())
    (folder / "chat_template.jinja").write_text(THINKING)
    with pytest.raises(StartError, match="environment 'm' says in chat_roles that it appends messages of role 'usr'"):
        load(parse(["--weights", str(folder), "--env", "m=tests.rollout.chat.test_wire:Misspelt"]))


def test_a_checkpoint_that_is_not_there_ends_the_command_before_it_is_ready(tmp_path: Path) -> None:
    done = command("--weights", str(tmp_path), "--bind", "tcp://127.0.0.1:0")
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout


def test_a_key_file_that_is_none_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    with pytest.raises(StartError, match="is no CURVE key file"):
        run_worker(parse(["--weights", "w", "--curve-secret", str(tmp_path / "key")]), load)


def test_a_local_worker_lives_as_long_as_its_block(checkpoint: Path) -> None:
    with (
        local_worker(checkpoint, max_running=4, overlap=False, prefix_cache=True) as worker,
        RawClient(worker.address) as client,
    ):
        assert client.hello(timeout=30)["type"] == "welcome"
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_a_local_worker_that_cannot_start_raises() -> None:
    with pytest.raises(RuntimeError, match="exit code 1"), local_worker("/no/such/folder"):
        pytest.fail("it is not ready")


# CURVE.


@pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq is built without CURVE")
def test_with_curve_only_clients_with_a_known_key_are_served(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    clients.mkdir()
    zmq.auth.create_certificates(tmp_path, "worker")
    zmq.auth.create_certificates(clients, "friend")
    server_key, _ = zmq.auth.load_certificate(tmp_path / "worker.key")
    friend = zmq.auth.load_certificate(clients / "friend.key_secret")
    stranger = zmq.curve_keypair()
    arguments = ("--curve-secret", str(tmp_path / "worker.key_secret"), "--curve-clients", str(clients))
    worker = WorkerProcess("tests.rollout.stub_worker", *arguments, folder=tmp_path)
    try:
        address = worker.wait_ready().address
        with RawClient(address, curve=(server_key, *friend)) as client:
            assert client.hello()["type"] == "welcome"
            client.call("submit", batch_id="b", groups=[group()])
            assert client.record()["status"] == "truncated"
        for keys in ((server_key, *stranger), None):
            with RawClient(address, curve=keys) as client, pytest.raises(TimeoutError):
                client.hello(timeout=1.0)
    finally:
        worker.kill()

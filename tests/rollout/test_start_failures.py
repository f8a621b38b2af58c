"""A worker that cannot start says why and what to do, in one sentence and without a traceback."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import EngineError, OutOfMemory, WeightsIncomplete, WeightsInvalid
from engine.memory.memory import Memory, within_memory
from engine.start.build import load_engine
from rollout.command import load as loading
from rollout.command.advice import advice
from rollout.command.cli import main, run
from rollout.command.config import WorkerConfig
from rollout.command.start import Loaded
from tests import rigs

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return rigs.write_rand(tmp_path / "m")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_WORKER_METRICS_FILE", str(tmp_path / "metrics.jsonl"))
    monkeypatch.setattr("rollout.command.cli.set_up_logs", lambda *_: None)
    monkeypatch.setattr("rollout.command.cli.signal.signal", lambda *_: None)


def config_with(path: Path, **change: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def said(capsys: pytest.CaptureFixture[str], *arguments: str, weights: Path) -> str:
    """The one line on standard error of a worker that ends with code 1."""
    assert main(["--weights", str(weights), "--bind", "tcp://127.0.0.1:0", *arguments]) == 1
    captured = capsys.readouterr()
    assert not captured.out
    (line,) = captured.err.splitlines()
    assert line.startswith("rollout-worker: ")
    return line.removeprefix("rollout-worker: ")


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (lambda p: (p / "config.json").unlink(), ["--weights", "config.json: there is no such file"]),
        (lambda p: (p / "config.json").write_text("{"), ["config.json: cannot be read as JSON", "make the copy again"]),
        (lambda p: config_with(p, quantization_config={}), ["are not supported: take the one it was made from"]),
        (lambda p: config_with(p, hidden_size=32), ["expected shape", "save it with its own config.json"]),
        (lambda p: config_with(p, architectures=["GPT2LMHeadModel"]), ["GPT2LMHeadModel is not supported; supported:"]),
        (lambda p: config_with(p, num_hidden_layers=3), ["is missing: make the copy again"]),
        (cut, ["model.safetensors: has", "bytes, expected", "make the copy again"]),
        (lambda p: (p / "model.safetensors").write_bytes(LFS), ["is a Git LFS pointer", "git lfs pull"]),
        (lambda p: (p / "model.safetensors").unlink(), ["holds no safetensors file: save it as safetensors"]),
        (lambda p: (p / "tokenizer.json").write_text("{"), ["tokenizer.json: not a usable tokenizer.json"]),
        (lambda p: (p / "tokenizer_config.json").write_text("[]"), ["tokenizer_config.json: must hold an object"]),
    ],
)
def test_a_checkpoint_that_is_not_whole(
    path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], parts: list[str]
) -> None:
    spoil(path)
    line = said(capsys, weights=path)
    for part in parts:
        assert part in line
    assert str(path) in line or "config.json" in line


def test_a_name_of_a_hub_is_no_directory(capsys: pytest.CaptureFixture[str]) -> None:
    line = said(capsys, weights=Path("Qwen/Qwen3-4B"))
    assert line.startswith("--weights Qwen/Qwen3-4B: there is no such directory; it must be a local one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-context", "5000"], "max_context 5000 is above the checkpoint's 4096 positions: lower --max-context"),
        (["--kv-memory", "10"], "at least 2 are needed: give --kv-tokens or --kv-memory more"),
        (["--kv-memory", "1000T"], "for kv pool, after weights 0.7 MB"),
        (["--kv-memory", "1000T"], "lower --kv-tokens"),
        (["--ready-file", "/no/such/ready"], "--ready-file /no/such/ready: its directory is not there"),
        (["--ready-file", "/tmp"], "--ready-file /tmp: is a directory: name a file"),
        (["--curve-secret", "/no/such/key"], "--curve-secret /no/such/key: there is no such file"),
        (
            ["--curve-secret", "/dev/null"],
            "--curve-secret /dev/null is no CURVE key file: zmq.auth.create_certificates",
        ),
        (["--kv-tokens", "9" * 20], "for kv pool, after weights 0.7 MB"),
        (["--max-running", "9" * 13, "--max-step-tokens", "9" * 13], "lower --kv-tokens, --max-running"),
        (["--env", "a=exiting:X"], "--env a=exiting:X: SystemExit: bye"),
        (["--env", "a=nonsense:X"], "--env a=nonsense:X: SyntaxError: invalid syntax"),
        (
            ["--env", "a=no.such:X"],
            "--env a=no.such:X: ModuleNotFoundError: No module named 'no'; it must be installed",
        ),
        (
            ["--bind", "ipc:///no/such/directory/socket"],
            "cannot bind ipc:///no/such/directory/socket: No such file or ",
        ),
        (
            ["--bind", "tcp://127.0.0.1:0", "--metrics-port", "0", "--metrics-host", "192.0.2.1"],
            "--metrics-host: 192.0.2.1",
        ),
    ],
)
def test_options_that_only_the_start_can_judge(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exiting.py").write_text("raise SystemExit('bye')\n")
    (tmp_path / "nonsense.py").write_text("def x(:\n")
    assert message in said(capsys, *arguments, weights=path)


def test_a_taken_port_of_either_kind(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"tcp://127.0.0.1:{port} is in use" in said(capsys, "--bind", f"tcp://127.0.0.1:{port}", weights=path)
        line = said(capsys, "--metrics-port", str(port), weights=path)
    assert line.startswith(f"--metrics-port: 127.0.0.1:{port} cannot be served")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float16"], "invalid choice: 'float16'"),
        (["--device", "cuda", "--dtype", "float32"], "--dtype float32 is not served on cuda"),
        (["--device", "cpu", "--decode-path", "graph"], "--decode-path graph needs a GPU"),
        (["--bind", "tcp://127.0.0.1:99999"], "--bind: tcp://127.0.0.1:99999: a port is at most 65535"),
        (["--bind", "tcp://[::1:5555"], "--bind: 'tcp://[::1:5555' must read tcp://HOST:PORT"),
        (["--bind", "tcp://127.0.0.1"], "--bind: 'tcp://127.0.0.1' must read"),
        (["--bind", "ipc://"], "--bind: 'ipc://' must read"),
        (["--env", "foo"], "--env: 'foo' must read name=module:Class or name=module:Class,process"),
        (["--env", "a=m:C", "--env", "=m:C"], "--env: '=m:C' must read"),
        (["--env", "a=m:C,thread"], "--env: 'a=m:C,thread' must read"),
        (["--tools", "tools/mine"], "--tools: 'tools/mine' is no module: write it as Python imports it"),
        (["--weights", ""], "--weights: is empty"),
        (["--wandb-project", ""], "--wandb-project: is empty"),
        (["--heartbeat-timeout", "1e300"], "--heartbeat-timeout: should be less than or equal to 1000000"),
        (["--prefix-cache", "no"], "--prefix-cache takes no value: write --prefix-cache or --no-prefix-cache"),
        (["stray"], "unrecognized arguments: stray; a checkpoint is given as --weights PATH"),
    ],
)
def test_options_that_are_wrong_by_themselves_end_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--weights", "w", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "rollout.command.gpu.lacking", lambda: "flashinfer is not installed: pip install 'rollout-worker[cuda]'"
    )
    line = said(capsys, "--device", "cuda", weights=path)
    assert line == (
        "--device cuda: flashinfer is not installed: pip install 'rollout-worker[cuda]'; or choose --device cpu"
    )
    # Installed, but torch sees none: the engine says so.
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(EngineError, match="torch finds no GPU: look at nvidia-smi"):
        load_engine(path, dtype="bfloat16", device="cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(EngineError, match="is built without CUDA: install a build with it"):
        load_engine(path, dtype="bfloat16", device="cuda")


def test_weights_that_the_host_has_no_memory_for_are_refused_before_they_are_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.start.build.host_bytes", lambda: 1_000_000)
    with pytest.raises(OutOfMemory) as caught:
        load_engine(path, EngineConfig(max_running=2, max_step_tokens=32, max_context=64))
    assert advice(caught.value) == (
        "the weights need 1.3 MB of memory on the host, which has 1.0 MB left: free some, or take a smaller model"
    )


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore\nlines"),
            "CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (MemoryError("Unable to allocate 9 EiB"), "Unable to allocate 9 EiB"),
        (MemoryError(), "no memory is left on the host"),
    ],
)
def test_what_is_refused_during_the_build_is_out_of_memory_too(refusal: Exception, said: str) -> None:
    @within_memory
    def build() -> None:
        raise refusal

    with pytest.raises(OutOfMemory) as caught:
        build()
    line = advice(caught.value)
    assert line.startswith(f"{said}: lower --kv-tokens")
    assert "\n" not in line


def test_memory_that_is_refused_is_one_line_with_what_was_taken() -> None:
    memory = Memory(torch.device("cpu"))
    memory.allocate(2_000_000, "weights")
    with pytest.raises(OutOfMemory) as caught:
        memory.allocate(2**60, "kv pool")
    assert str(caught.value) == "no 1,152,921,504,606.8 MB of memory on cpu for kv pool, after weights 2.0 MB"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError(13, "Permission denied", "/a/b"), "/a/b: permission denied: let this user read it"),
        (IsADirectoryError(21, "Is a directory", "/a"), "/a: Is a directory"),
        (OSError("odd"), "odd"),
        (ValueError("two\nlines"), "two lines"),
        (
            EngineError("the engine process was killed by signal 9 (Killed) before it was ready"),
            "the engine process was killed by signal 9 (Killed) before it was ready: the kernel may have run out of "
            "memory, dmesg tells; give it more, or take a smaller model",
        ),
        (WeightsInvalid("m: tensor a: wrong shape"), "--weights m: tensor a: wrong shape"),
        (
            WeightsIncomplete("m: cannot be opened: Permission denied"),
            "--weights m: cannot be opened: Permission denied: let this user read it",
        ),
    ],
)
def test_advice(error: Exception, text: str) -> None:
    assert advice(error) == text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_checkpoint_that_this_user_may_not_read(path: Path) -> None:
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer.json").chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(loading.StartError, match="this user read it"):
            loading.load(WorkerConfig(weights=path, device="cpu"))
    finally:
        os.seteuid(0)


def test_json_logs_say_it_as_an_object(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def load(_: WorkerConfig) -> Loaded:
        raise loading.StartError("no good")

    assert run(WorkerConfig(weights=path, bind="tcp://127.0.0.1:0", log_format="json"), load) == 1
    assert caplog.records[-1].getMessage() == "no good"
    assert caplog.records[-1].levelname == "CRITICAL"

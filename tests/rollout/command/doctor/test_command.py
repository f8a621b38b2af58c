"""`rollout-worker doctor` as a command: every check a line, the exit code says whether a worker would start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.weights.checkpoint import INDEX
from rollout.command.cli import main
from rollout.command.doctor import machine
from rollout.command.doctor.finding import Finding, safely
from tests.rigs import write_rand
from tests.rollout.chat import tiny
from tests.rollout.wire.test_channel import channel


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rand(tmp_path / "m", shards=2)


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code, and line by what was looked at."""
    code = main(["doctor", "--bind", "tcp://127.0.0.1:0", *arguments])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].split()[1::2] == ["ok,", "warn,", "fail"]
    return code, {line[6:19].strip(): line for line in lines[:-1]}


def test_a_machine_and_a_checkpoint_that_are_well(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = doctor(capsys, "--weights", str(path), "--kv-tokens", "64")
    assert code == 0
    assert "2 files" in lines["weights"]
    assert "25 tensors" in lines["weights"]
    for name in (
        "Python",
        "torch",
        "GPU",
        "memory",
        "shared memory",
        "open files",
        "address",
        "CURVE",
        "W&B",
        "KV cache",
    ):
        assert name in lines
    # Tokens alone do not need these.
    assert lines["tokenizer"].startswith("warn")
    assert lines["chat template"].startswith("warn")


def test_without_weights_no_checkpoint_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = doctor(capsys)
    assert code == 0
    assert not {"checkpoint", "weights", "tokenizer"} & lines.keys()


def test_options_come_from_the_file_too(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text(f"weights: {path}\nmax_context: 5000\n")
    code, lines = doctor(capsys, "--config", str(file))
    assert code == 1
    assert "5000 is above the checkpoint's 4096: lower --max-context" in lines["context"]


def test_an_option_that_is_wrong_is_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--max-runing", "3"])
    assert caught.value.code == 2
    assert "did you mean --max-running?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "what", "message"),
    [
        (lambda p: (p / "config.json").unlink(), "checkpoint", "there is no such file"),
        (lambda p: (p / "model-00002-of-00002.safetensors").unlink(), "weights", "model-00002-of-00002.safetensors"),
        (
            lambda p: (p / "config.json").write_text(
                json.dumps(json.loads((p / "config.json").read_text()) | {"num_hidden_layers": 3})
            ),
            "weights",
            "model.layers.2",
        ),
        (
            lambda p: (p / "config.json").write_text(
                json.dumps(json.loads((p / "config.json").read_text()) | {"vocab_size": 513})
            ),
            "weights",
            "expected shape [513, 64], found [512, 64]: make the copy again, or save it with its own config.json",
        ),
        (
            lambda p: (p / INDEX).write_text((p / INDEX).read_text().replace("model.norm.weight", "model.norm")),
            "weights",
            "tensor model.norm should be in",
        ),
        (lambda p: (p / "tokenizer.json").write_text("{}"), "tokenizer", "tokenizer.json"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(
    path: Path, capsys: pytest.CaptureFixture[str], spoil: object, what: str, message: str
) -> None:
    spoil(path)  # type: ignore[operator]
    code, lines = doctor(capsys, "--weights", str(path))
    assert code == 1
    assert lines[what].startswith("fail")
    assert message in lines[what]


def test_text_that_the_weights_do_not_belong_to_is_a_warning(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tiny.ordinary()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% for x in %}"}))
    code, lines = doctor(capsys, "--weights", str(path))
    assert code == 0
    assert lines["chat template"].startswith("warn")
    assert "does not compile" in lines["chat template"]
    assert lines["tokenizer"].startswith("ok")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    _, lines = doctor(capsys, "--weights", str(path))
    assert lines["tokenizer"].startswith(
        f"warn  tokenizer     tokenizer.json has ids up to {tokenizer.get_vocab_size() - 1}, the"
    )


def test_what_does_not_fit_is_said(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines = doctor(capsys, "--weights", str(path), "--kv-memory", "1000T")
    assert code == 1
    assert lines["KV cache"].startswith("fail")
    monkeypatch.setattr("rollout.command.doctor.checkpoint.host_bytes", lambda: 10**6)
    code, lines = doctor(capsys, "--weights", str(path))
    assert lines["host room"].startswith("fail  host room     1.3 MB for weights, twice, 1.0 MB left")
    assert "not one longest trajectory fits" in lines["KV cache"]


def test_a_taken_address_and_an_environment_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    taken = channel("tcp://127.0.0.1:0")
    code, lines = doctor(capsys, "--bind", taken.address, "--env", "x=no.such:Module")
    taken.close(0.0)
    assert code == 1
    assert f"{taken.address} is in use" in lines["address"]
    assert "x=no.such:Module" in lines["environments"]


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no\nsuch thing")

    monkeypatch.setattr(machine, "check", broken)
    code, lines = doctor(capsys)
    assert code == 1
    assert lines["memory"] == "fail  memory        cannot be looked at, RuntimeError: no such thing"
    assert "address" in lines


def test_findings_before_a_break_are_kept() -> None:
    def check() -> object:
        yield Finding("ok", "a", "b")
        raise OSError("gone")

    assert [finding.level for finding in safely("x", check)] == ["ok", "fail"]  # type: ignore[arg-type]

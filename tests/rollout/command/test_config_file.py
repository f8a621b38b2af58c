"""The configuration as a file: what is printed is what is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq.auth
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.command.cli import main, parse
from rollout.command.config import WorkerConfig, parse_bytes, shown_size
from rollout.command.config_file import ConfigFileError, read_file, write_config


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_WORKER_DEVICE", raising=False)


ARGUMENTS: list[Any] = [
    [],
    ["--kv-memory", "3G", "--no-overlap", "--env", "a=b:C", "--env", "d=e:F", "--log-format", "json"],
    ["--kv-tokens", "1000", "--bind", "ipc:///tmp/with space # and hash", "--window", "1000001"],
    ["--weights", "no", "--ready-file", "1e3", "--client-timeout", "1e-3", "--weight-version", "-9"],
    ["--weights", "ünï: 'quoted' \"twice\" " + "long " * 50],
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_what_is_printed_is_read_back_as_the_same(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--weights", "w", *arguments]
    assert main([*arguments, "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert parse(["--config", str(file)]) == parse(arguments)


def test_it_says_where_each_value_came_from_and_names_every_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "worker.yaml"
    file.write_text("weights: /models/m\nmax_running: 8\n")
    monkeypatch.setenv("ROLLOUT_WORKER_KV_TOKENS", "4096")
    assert main(["--config", str(file), "--max-context", "512", "--print-config"]) == 0
    out = capsys.readouterr().out
    origins = {line.split(":")[0]: line.split("  # ")[1] for line in out.splitlines() if "  # " in line}
    assert origins["weights"] == f"{file}:1"
    assert origins["max_running"] == f"{file}:2"
    assert origins["kv_tokens"] == "environment ROLLOUT_WORKER_KV_TOKENS"
    assert origins["max_context"] == "command line"
    assert origins["bind"] == "default"
    assert origins.keys() == yaml.safe_load(out).keys() == WorkerConfig.model_fields.keys()


def test_no_secret_is_in_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zmq.auth.create_certificates(tmp_path, "worker")
    _, secret = zmq.auth.load_certificate(tmp_path / "worker.key_secret")
    assert secret is not None
    assert main(["--weights", "w", "--curve-secret", str(tmp_path / "worker.key_secret"), "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "worker.key_secret" in out
    assert secret.decode() not in out


def test_entries_know_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("# first\nkv-tokens: 0x10\n\nenv:\n  - a\n  - b\nbind: 'x'\n")
    entries = read_file(file)
    assert {name: (entry.value, entry.line) for name, entry in entries.items()} == {
        "kv_tokens": (16, 2),
        "env": (["a", "b"], 4),
        "bind": ("x", 7),
    }


def test_two_documents_in_one_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("weights: a\n---\nweights: b\n")
    with pytest.raises(ConfigFileError, match=r"f\.yaml:2: is no YAML: but found another document"):
        read_file(file)


@pytest.mark.parametrize("text", ["env: " + "[" * 100_000, "{" * 100_000])
def test_brackets_without_end_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "f.yaml"
    file.write_text(text)
    with pytest.raises(ConfigFileError, match=r"f\.yaml: is nested too deeply"):
        read_file(file)


@settings(deadline=None)
@given(st.integers(1, 2**50))
def test_sizes_are_shown_as_they_are_read(size: int) -> None:
    assert parse_bytes(shown_size(size)) == size


def test_a_path_longer_than_the_column_moves_nobody_else() -> None:
    config = WorkerConfig(weights=Path("w" * 100))
    lines = write_config(config, {}).splitlines()
    columns = {line.index("  # ") for line in lines if "  # " in line and not line.startswith("weights")}
    assert len(columns) == 1
    assert columns.pop() < 60

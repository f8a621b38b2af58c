"""docs/operations.md and its example file say what there is."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from rollout.command.cli import main, parse
from rollout.command.config import WorkerConfig, flag
from rollout.command.logs import JsonFormatter
from tests.engine.handles.test_log_line import record_of

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/worker.yaml"
TEXT = (ROOT / "docs/operations.md").read_text()


def test_the_example_file_is_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_WORKER_DEVICE", raising=False)
    config = parse(["--config", str(EXAMPLE)])
    assert (config.device, config.max_running, config.max_step_tokens) == ("cuda", 256, 16384)
    assert config.env == ("search=my_package.environments:Search",)
    assert (config.bind, config.log_format, config.drain_timeout) == ("tcp://0.0.0.0:5555", "json", 60.0)
    assert config.curve_clients == Path("/etc/rollout-worker/clients")


def test_the_commands_are_ones_that_the_worker_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.yaml").write_text("weights: w\n")
    blocks = re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    commands = [line.partition("  #")[0] for block in blocks for line in block.replace("\\\n", "").splitlines()]
    worker = [shlex.split(line)[1:] for line in commands if line.startswith("rollout-worker ")]
    assert len(worker) >= 4
    for arguments in worker:
        if arguments[0] != "doctor":
            assert main([*arguments, "--print-config"]) == 0
    assert capsys.readouterr().out.count("# rollout-worker") == len(worker) - 1


def test_options_variables_and_codes_that_it_names_exist() -> None:
    known = {flag(name) for name in WorkerConfig.model_fields} | {"--config", "--print-config"}
    others = {"--gpus", "--shm-size", "--ulimit", "--stop-timeout", "--network"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXT)) <= known | others
    for name in re.findall(r"ROLLOUT_WORKER_([A-Z_]+)", TEXT):
        assert name == "CONFIG" or name.lower() in WorkerConfig.model_fields


def test_the_unit_is_one_and_waits_longer_than_a_drain() -> None:
    (unit,) = re.findall(r"```ini\n(.*?)```", TEXT, re.DOTALL)
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    service = parser["Service"]
    drain = parse(["--config", str(EXAMPLE), "--device", "cpu"]).drain_timeout
    assert int(service["TimeoutStopSec"]) > drain + WorkerConfig(weights=Path("w")).ack_timeout
    assert service["RestartPreventExitStatus"] == "2"


def test_the_log_line_that_it_shows_has_the_form_of_ours() -> None:
    (shown,) = re.findall(r"```json\n(.*?)\n```", TEXT, re.DOTALL)
    ours = json.loads(JsonFormatter().format(record_of("ready", extra={"pid": 7})))
    assert json.loads(shown).keys() == ours.keys()

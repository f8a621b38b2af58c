"""What the doctor says of machines that are not at hand."""

from __future__ import annotations

import resource
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import zmq.auth

from rollout.command.config import WorkerConfig
from rollout.command.doctor import device, machine, network, software, watching
from rollout.command.doctor.device import Gpu
from rollout.command.doctor.finding import Finding

H200 = Gpu("NVIDIA H200", (9, 0), 150 * 10**9, 151 * 10**9, (13, 0), (13, 0), "580.95.05")


def levels(gpu: Gpu) -> dict[str, str]:
    return {finding.what: finding.level for finding in device.judge(gpu)}


@pytest.mark.parametrize(
    ("gpu", "wrong"),
    [
        (H200, {}),
        (replace(H200, capability=(7, 5)), {"GPU": "fail"}),
        (replace(H200, cuda=(12, 8)), {}),
        (replace(H200, driver_cuda=(13, 1)), {}),
        (replace(H200, driver_cuda=(12, 8)), {"driver": "fail"}),
        (replace(H200, free=100 * 10**9), {"GPU memory": "warn"}),
        (replace(H200, cuda=(12, 9), driver_cuda=(12, 4)), {}),
    ],
)
def test_gpus(gpu: Gpu, wrong: dict[str, str]) -> None:
    assert levels(gpu) == {"GPU": "ok", "driver": "ok", "GPU memory": "ok"} | wrong


def test_what_is_said_of_a_gpu() -> None:
    text = "\n".join(finding.line() for finding in device.judge(H200))
    for part in ("NVIDIA H200, compute capability 9.0", "580.95.05, serves CUDA 13.0", "150.0 GB free of 151.0 GB"):
        assert part in text


@pytest.mark.parametrize(
    ("asked", "visible", "lacking", "level", "part"),
    [
        ("auto", True, "triton is not installed: pip install x", "warn", "triton is not installed, so that the model"),
        ("cpu", True, None, "ok", "leaves it alone"),
        ("auto", False, None, "ok", "none to be seen"),
    ],
)
def test_a_model_on_the_cpu(asked: str, visible: bool, lacking: str | None, level: str, part: str) -> None:
    (finding,) = device.on_cpu(asked, visible, lacking)
    assert finding.level == level
    assert part in finding.line()


WANTED = [
    "numpy>=1.0",
    "torch>=99",
    'flashinfer-python<0.7,>=0.6.14; extra == "cuda"',
    'ruff>=0.1; extra == "dev"',
    'wandb>=0.23; extra == "wandb"',
]
INSTALLED = {"numpy": "1.26.4", "torch": "2.11.0+cu130", "flashinfer-python": "0.7.1"}


@pytest.mark.parametrize(
    ("extras", "advice"),
    [
        (set(), {"pip install 'torch>=99'"}),
        ({"cuda"}, {"pip install 'torch>=99'", "pip install 'flashinfer-python<0.7,>=0.6.14'"}),
        ({"wandb"}, {"pip install 'torch>=99'", "pip install 'wandb>=0.23'"}),
    ],
)
def test_packages_that_are_missing_or_of_another_version(
    monkeypatch: pytest.MonkeyPatch, extras: set[str], advice: set[str]
) -> None:
    monkeypatch.setattr(software, "version_of", INSTALLED.get)
    found = list(software.packages(WANTED, extras))
    assert {finding.advice for finding in found} == advice
    assert {finding.level for finding in found} == {"fail"}
    (well,) = software.packages(WANTED[:1], extras)
    assert well == Finding("ok", "packages", "1 installed, in the versions that are asked for")


def test_an_old_interpreter() -> None:
    assert software.python((3, 10)).level == "fail"
    assert software.python((3, 11)).level == "ok"


def test_without_what_gpus_need_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.command.gpu.lacking", lambda: "triton is not installed: pip install x")
    (finding,) = software.for_gpus()
    assert finding.line() == "fail  flashinfer    triton is not installed: pip install x"


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (machine.memory(10**9), "warn"),
        (machine.memory(10**11), "ok"),
        (machine.shared(None), "warn"),
        (machine.shared(64 * 2**20), "warn"),
        (machine.shared(2**33), "ok"),
        (machine.files(1024, 1024), "warn"),
        (machine.files(1024, 65536), "ok"),
        (machine.files(1024, resource.RLIM_INFINITY), "ok"),
        (watching.wandb(None, "auto", None, False), "ok"),
        (watching.wandb("p", "disabled", None, False), "ok"),
        (watching.wandb("p", "auto", None, False), "warn"),
        (watching.wandb("p", "auto", "0.31", False), "warn"),
        (watching.wandb("p", "auto", "0.31", True), "ok"),
        (watching.wandb("p", "offline", "0.31", False), "ok"),
    ],
)
def test_levels(finding: Finding, level: str) -> None:
    assert finding.level == level
    assert (level == "ok") == (finding.advice == "")


def test_a_key_that_others_may_read_and_clients_that_are_not_named(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "worker")
    secret, clients = tmp_path / "worker.key_secret", tmp_path / "clients"
    clients.mkdir()
    zmq.auth.create_certificates(clients, "one")

    def look(**options: object) -> Finding:
        (finding,) = network.curve(WorkerConfig(weights=Path("w"), **options))  # type: ignore[arg-type]
        return finding

    secret.chmod(0o600)
    assert look(curve_secret=secret, curve_clients=clients).found == "keys are sound, 1 client let in"
    assert look(curve_secret=secret).level == "warn"
    secret.chmod(0o644)
    assert look(curve_secret=secret, curve_clients=clients).advice == f"chmod 600 {secret}"
    assert look(curve_secret=tmp_path / "none").level == "fail"
    assert look(curve_secret=tmp_path / "worker.key").level == "fail"


def test_a_taken_metrics_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert watching.port("127.0.0.1", number).level == "fail"
    assert watching.port("127.0.0.1", number).level == "ok"
    assert watching.metrics_file(tmp_path / "not" / "there" / "yet").level == "ok"


def test_a_login_is_seen_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    assert not watching.logged_in({}, file)
    assert watching.logged_in({"WANDB_API_KEY": "x"}, file)
    file.write_text("machine example.org login a password b\n")
    assert not watching.logged_in({}, file)
    file.write_text("machine api.wandb.ai login a password b\n")
    assert watching.logged_in({}, file)
    file.write_text("machine\n")
    assert not watching.logged_in({}, file)

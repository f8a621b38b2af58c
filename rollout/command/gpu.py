"""Is there a GPU to serve on, and is what that takes installed? Looked at without importing torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rollout.command.versions import version_of

DEVICES: Final = Path("/dev")
EXTRA: Final = "pip install 'rollout-worker[cuda]' (in a checkout: pip install -e '.[cuda]')"


def visible(devices: Path = DEVICES, environ: Mapping[str, str] = os.environ) -> bool:
    """Has this machine an NVIDIA GPU that this process may use?"""
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None and allowed.split(",")[0].strip() in ("", "-1"):
        return False
    return any(re.fullmatch(r"nvidia\d+", path.name) for path in devices.glob("nvidia*"))


def lacking() -> str | None:
    """What is not installed that a GPU needs, and how to get it; None where all is there."""
    torch = version_of("torch")
    if torch is not None and torch.endswith("+cpu"):
        return f"torch {torch} is built without CUDA: install a build of torch with CUDA"
    missing = [name for name in ("flashinfer", "triton") if find_spec(name) is None]
    if version_of("cuda-bindings") is None:  # what is imported, `cuda`, is a name that several packages share
        missing.append("cuda-bindings")
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} {verb} not installed: {EXTRA}"
    return None

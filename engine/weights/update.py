"""Weights that serve, and the next ones: prepared in a second buffer while steps run, then copied over in place."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import torch

from engine.errors import WeightsBusy, WeightsError, WeightsInvalid
from engine.memory.memory import Memory
from engine.model.config import ModelConfig, read_model_config
from engine.start.progress import Progress, silent
from engine.step import WeightsInfo
from engine.weights.arena import Arena
from engine.weights.checkpoint import SCRATCH_BYTES, read_checkpoint


class Weights:
    """The `WeightStore` of a worker. `arena` is what serves; it holds nothing until the first commit.

    The staging arena and the scratch buffer are taken once and reused by every update, so memory does not grow.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, memory: Memory) -> None:
        self.arena = Arena(config, dtype, memory, "weights")
        self._config = config
        self._staging = Arena(config, dtype, memory, "weights staging", host=True)
        self._scratch = memory.allocate(SCRATCH_BYTES, "weights scratch", host=True)
        self._preparing = threading.Lock()
        self._prepared: WeightsInfo | None = None
        self._digest = ""

    @property
    def digest(self) -> str:
        """Digest of what serves now."""
        return self._digest

    def prepare(
        self, path: str, version: int, checksums: Mapping[str, str] | None = None, progress: Progress = silent
    ) -> WeightsInfo:
        """Read, cast and check a checkpoint into the staging arena; nothing that serves changes.

        checksums: file name -> "sha256:hex". Raises `WeightsIncomplete`, `WeightsInvalid`, or `WeightsBusy` while
        another call runs. What was prepared before is forgotten.
        """
        if not self._preparing.acquire(blocking=False):
            raise WeightsBusy("another update is being prepared")
        try:
            started = time.monotonic()
            self._prepared = None
            read_checkpoint(Path(path), self._staging, self._scratch, checksums, progress)
            self._check_config(Path(path))
            digest = weights_digest(self._staging.parts)
            self._prepared = WeightsInfo(version, digest, self._staging.nbytes, time.monotonic() - started)
            return self._prepared
        finally:
            self._preparing.release()

    def commit(self) -> None:
        """Copy what was prepared over what serves: same addresses, one copy. No step may run meanwhile."""
        if self._prepared is None:
            raise WeightsError("nothing is prepared to commit")
        self.arena.flat.copy_(self._staging.flat)
        self._digest, self._prepared = self._prepared.digest, None

    def discard(self) -> None:
        """Forget what was prepared."""
        self._prepared = None

    def _check_config(self, path: Path) -> None:
        """An update that brings a config.json means the function that this worker computes."""
        if not (path / "config.json").is_file():
            return
        theirs = read_model_config(path)
        for name in self._config.differences(theirs):
            message = f"expected {name} {getattr(self._config, name)}, found {getattr(theirs, name)}"
            raise WeightsInvalid(f"{path / 'config.json'}: {message}", field=name)


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """ "sha256:hex" of a model: over its tensors sorted by HF name, for each the line "name shape\\n" (as
    `lm_head.weight [512, 64]`) and the sha256 of its bytes, row-major, in the worker's dtype.

    A tied head is not among `tensors`, so it counts once; how the engine fuses tensors does not show. Hashing each
    tensor apart lets both ends do it in parallel.
    """
    names = sorted(tensors)
    total = sha256()
    with ThreadPoolExecutor() as pool:  # hashing a large buffer lets other threads run
        for name, digest in zip(names, pool.map(lambda name: _sha256(tensors[name]), names), strict=True):
            total.update(f"{name} {list(tensors[name].shape)}\n".encode() + digest)
    return f"sha256:{total.hexdigest()}"


def _sha256(tensor: torch.Tensor) -> bytes:
    return sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).digest()

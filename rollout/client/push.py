"""Weights of a live torch model on their way to a worker, as safetensors in a directory that both can read.

torch and safetensors are imported by the call that writes: a client that pushes nothing needs neither.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocols.errors import BadRequest, RolloutError, WeightsInvalid
from rollout.client.errors import NotInstalled
from rollout.client.values import absolute

if TYPE_CHECKING:
    import torch

    Weights = torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]

SHARD_BYTES = 4 * 2**30
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of a name that torch.compile, FSDP and activation checkpointing put in; nothing of the model is called so."""
ADAPTER = re.compile(r"^base_model\.|(^|\.)(lora_\w+|base_layer|modules_to_save|original_module)(\.|$)")
OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How safetensors says in words what the system said, a full disk say."""
HERE = re.compile(r"ipc://.*|tcp://(localhost|127\.[\d.]+|\[::1\]):\d+")


class PushedWeights:
    """The directories that one client has written. `address`: the worker's, which has to read them.

    Each push is a directory of its own, which appears under its name only when all of it is written. The one that
    serves is kept, as a restarted worker is given it again; it goes when the next one serves, or at `close`.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._folder = f"rollout-weights-{secrets.token_hex(6)}"
        self._roots: set[Path] = set()
        self._kept: list[Path] = []
        self._lock = threading.Lock()

    def write(self, weights: Weights, version: int, directory: str | os.PathLike[str] | None) -> Path:
        """Raises WeightsInvalid (a tensor that cannot be handed over, by name), BadRequest (an argument), OSError (the
        disk). Nothing is left behind then."""
        path = self._root(directory) / f"{next(self._numbers):06d}-version-{version}"
        partial = path.with_name(f".{path.name}")
        try:
            with self._lock:  # nobody takes the folder away between the two
                path.parent.mkdir(mode=0o700 if directory is None else 0o777, exist_ok=True)
                partial.mkdir()
            write_weights(weights, partial)
            partial.rename(path)
        except BaseException:
            self.remove(partial)
            raise
        return path

    @contextmanager
    def keeping(self, path: Path) -> Iterator[None]:
        """Around the update that makes `path` serve."""
        try:
            yield
        except RolloutError:
            self.remove(path)  # the client has forgotten this update: a restarted worker is not given it
            raise
        except BaseException:
            with self._lock:
                self._kept.append(path)  # the wait was broken off, and the update may yet serve
            raise
        with self._lock:
            old, self._kept = self._kept, [path]
        for before in old:
            self.remove(before)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        with self._lock, suppress(OSError):  # another push is in it
            path.parent.rmdir()

    def close(self) -> None:
        """Remove everything. In a forked child it does nothing: the directories are its parent's."""
        if os.getpid() == self._pid:
            for root in self._roots:
                shutil.rmtree(root, ignore_errors=True)

    def _root(self, directory: str | os.PathLike[str] | None) -> Path:
        """The folder of this client in `directory`, or in the system's temporary one."""
        if directory is None and not HERE.fullmatch(self._address):
            raise BadRequest(
                f"is required: the worker at {self._address} cannot read this machine's temporary files."
                " Name a directory that both see",
                field="directory",
            )
        base = Path(tempfile.gettempdir() if directory is None else absolute(directory, "directory"))
        if not base.is_dir():
            raise BadRequest(f"is no directory here: {base}. Make it where the worker sees it too", field="directory")
        root = base / self._folder
        self._roots.add(root)
        return root


def check_installed() -> None:
    """Raises NotInstalled where what a live model is written with is not there."""
    for module in ("torch", "safetensors.torch"):
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            raise NotInstalled(
                f"push_weights needs torch and safetensors, and {error.name} is not installed: pip install {error.name}"
            ) from None


def write_weights(weights: Weights, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `model.safetensors` into `folder`; above `shard_bytes`, shards and their index.

    weights: a model, its state dict, or (name, tensor) pairs, which may be made one by one. At most one shard is
    copied to the host at a time.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    home: dict[str, str] = {}
    held = total = 0

    def save(file: str) -> None:
        try:
            save_file(shard, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            if (number := OS_ERROR.search(str(error))) is None:
                raise WeightsInvalid(f"cannot be written: {error}", field="weights") from None
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder / file)) from None
        except RuntimeError as error:  # two names of the same memory
            raise WeightsInvalid(f"cannot be written: {error}", field="weights") from None
        home.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in hf_tensors(weights):
        if shard and held + tensor.nbytes > shard_bytes:
            save(f"model-{len(set(home.values())) + 1:05d}.safetensors")
            held = 0
        shard[name] = tensor.to("cpu").contiguous()
        held += tensor.nbytes
        total += tensor.nbytes
    if not home:
        save("model.safetensors")
        return
    save(f"model-{len(set(home.values())) + 1:05d}.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def hf_tensors(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the names of a Hugging Face checkpoint, without a head that is the embedding itself.

    Raises WeightsInvalid naming the tensor for what is no float32, float16 or bfloat16 with data of its own, for two
    names that become one, and for names of an adapter. Whether they are all there, the worker knows.
    """
    import torch

    seen: dict[str, str] = {}
    # Both are held to the end: while they live, no other tensor has their addresses.
    embedding: torch.Tensor | None = None
    head: torch.Tensor | None = None
    for pair in _pairs(weights):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise BadRequest(f"must be (name, tensor) pairs: found a {type(pair).__name__}", field="weights")
        given, tensor = pair
        name = hf_name(given)
        if name in seen:
            raise WeightsInvalid(f"{seen[name]} and {given} are both {name}", field=name)
        seen[name] = given
        if not isinstance(tensor, torch.Tensor):
            raise WeightsInvalid(f"{given} is a {type(tensor).__name__}, not a tensor", field=name)
        if hasattr(tensor, "full_tensor"):
            raise WeightsInvalid(
                f"{given} is sharded over processes: gather it with full_tensor(), on all of them", field=name
            )
        if tensor.layout is not torch.strided:
            raise WeightsInvalid(f"{given} is {str(tensor.layout).removeprefix('torch.')}, not dense", field=name)
        if tensor.is_meta:
            raise WeightsInvalid(f"{given} is on the meta device, so it has no values", field=name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise WeightsInvalid(f"{given} is {tensor.dtype}, not float32, float16 or bfloat16", field=name)
        if name == HEAD:
            head = tensor.detach()
            continue
        if name == EMBEDDING:
            embedding = tensor.detach()
        yield name, tensor.detach()
    if head is not None and (embedding is None or not _same(head, embedding)):
        yield HEAD, head


def hf_name(name: str) -> str:
    """Without the parts that wrappers put in: `module.` (DDP) in front, `_orig_mod.` (torch.compile),
    `_fsdp_wrapped_module.` and `_checkpoint_wrapped_module.` anywhere. Raises WeightsInvalid for an adapter's names,
    which no rule turns into the model's."""
    if ADAPTER.search(name):
        raise WeightsInvalid(
            f"{name} belongs to an adapter, which the worker does not have: push a model with the adapter merged in"
            " (PEFT: copy.deepcopy(model).merge_and_unload())",
            field=name,
        )
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[:1] == ["module"]:
        del parts[0]
    return ".".join(parts)


def _pairs(weights: Any) -> Iterable[Any]:
    if hasattr(weights, "state_dict"):
        weights = weights.state_dict()
    if isinstance(weights, Mapping):
        return weights.items()
    if isinstance(weights, Iterable) and not isinstance(weights, str | bytes | os.PathLike):
        return weights
    raise BadRequest(
        f"must be a model, its state dict or (name, tensor) pairs, not {type(weights).__name__};"
        " a checkpoint that is written already goes to update_weights",
        field="weights",
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.device == other.device

"""Reading a checkpoint: which files it has, what their headers promise, then every tensor cast into an arena.

All names, shapes and dtypes are checked before the first tensor is read. Extra memory is one scratch buffer of fixed
size. Every fault is refused naming the file or the tensor, with what was expected and what was found; the arena then
holds a mixture and must not serve.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

import torch

from engine.arena import EMBEDDING, HEAD, Arena
from engine.errors import WeightsIncomplete, WeightsInvalid
from engine.safetensors_file import Entry, SafetensorsFile, check_sum

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARDS = "model-*-of-*.safetensors"
SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCRATCH_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Files:
    """The safetensors files of a checkpoint in reading order. home: HF name -> file; None without an index."""

    paths: tuple[Path, ...]
    home: Mapping[str, Path] | None


def find_files(path: Path) -> Files:
    """`path` is a safetensors file, or a directory with one, or with shards and their index."""
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError as error:
        raise WeightsIncomplete(f"{path}: cannot be looked at: {error.strerror}", field=path.name) from error
    if is_file:
        return Files((path,), None)
    if not is_directory:
        raise WeightsIncomplete(f"{path}: there is no such file or directory", field=path.name)
    if (path / INDEX).exists():
        home = _read_index(path / INDEX)
        shards = tuple(sorted(set(home.values())))
        if (path / SINGLE).exists() and path / SINGLE not in shards:
            raise WeightsInvalid(f"{path}: holds both {SINGLE} and {INDEX}; which one is meant?", field=INDEX)
        return Files(shards, home)
    found = tuple(sorted(path.glob("*.safetensors")))
    if not found:
        raise WeightsIncomplete(f"{path}: holds no safetensors file", field=path.name)
    if path / SINGLE in found and not any(path.glob(SHARDS)):
        return Files((path / SINGLE,), None)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise WeightsIncomplete(f"{path}: holds several safetensors files ({names}) but no {INDEX}", field=INDEX)
    return Files(found, None)


def read_checkpoint(
    path: Path, arena: Arena, scratch: torch.Tensor, checksums: Mapping[str, str] | None = None
) -> None:
    """Fill `arena`, which is on the host, from a checkpoint.

    scratch: uint8[n] to read through. checksums: file name -> "sha256:hex" over the whole file, for any files of the
    directory. Raises `WeightsIncomplete` or `WeightsInvalid`.
    """
    files = find_files(path)
    sums = dict(checksums or {})
    for name in sums.keys() - {file.name for file in files.paths}:
        _check_other_file(path, name, sums[name])
    with ExitStack() as stack:
        sources = [stack.enter_context(SafetensorsFile(file, sums.get(file.name))) for file in files.paths]
        if files.home is not None:
            _check_index(sources, files.home)
        _check_headers(path, sources, arena)
        done: set[str] = set()
        for source in sources:
            for entry in source.entries:
                _read_tensor(source, entry, arena, scratch, done)
            source.finish()


def _check_other_file(path: Path, name: str, checksum: str) -> None:
    """The checksum of a small file beside the weights; that of a weights file comes with reading it."""
    if Path(name).name != name or not (path / name).is_file():
        raise WeightsInvalid(f"{path}: a checksum is given for {name}, which is no file of it", field=name)
    with (path / name).open("rb") as file:
        check_sum(path / name, file_digest(file, "sha256").hexdigest(), checksum)


def _read_index(index: Path) -> dict[str, Path]:
    try:
        raw = json.loads(index.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsIncomplete(f"{index}: cannot be read as JSON: {error}", field=INDEX) from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsInvalid(f"{index}: has no weight_map", field=INDEX)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise WeightsInvalid(
                f"{index}: tensor {name} is in {file!r}, which is no safetensors file name", field=INDEX
            )
    return {name: index.parent / file for name, file in weight_map.items()}


def _check_index(sources: Sequence[SafetensorsFile], home: Mapping[str, Path]) -> None:
    """The index and the shards agree on where each tensor is."""
    held = {source.path: {entry.name for entry in source.entries} for source in sources}
    for name, file in home.items():
        if name not in held[file]:
            raise WeightsIncomplete(f"{INDEX}: tensor {name} should be in {file.name}, which has it not", field=name)
    for file, names in held.items():
        for name in names:
            if home.get(name) != file:
                where = home[name].name if name in home else "nowhere"
                raise WeightsInvalid(f"{file}: holds tensor {name}, which {INDEX} puts {where}", field=name)


def _check_headers(path: Path, sources: Sequence[SafetensorsFile], arena: Arena) -> None:
    """Names, dtypes and shapes are exactly those of the arena; a head beside tied weights is the one extra allowed."""
    seen: dict[str, Path] = {}
    for source in sources:
        for entry in source.entries:
            name = entry.name
            if name in seen:
                raise WeightsInvalid(f"tensor {name} is in {seen[name].name} and in {source.path.name}", field=name)
            seen[name] = source.path
            expected = arena.parts.get(_place(name, arena))
            if expected is None:
                raise WeightsInvalid(f"{source.path}: unexpected tensor {name} {list(entry.shape)}", field=name)
            if entry.dtype not in SOURCE_DTYPES:
                message = f"expected dtype {', '.join(SOURCE_DTYPES)}, found {entry.dtype}"
                raise WeightsInvalid(f"{source.path}: tensor {name}: {message}", field=name)
            if entry.shape != tuple(expected.shape):
                message = f"expected shape {list(expected.shape)}, found {list(entry.shape)}"
                raise WeightsInvalid(f"{source.path}: tensor {name}: {message}", field=name)
    missing = [name for name in arena.parts if name not in seen]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise WeightsIncomplete(f"{path}: tensor {missing[0]}{more} is missing", field=missing[0])


def _place(name: str, arena: Arena) -> str:
    """The tensor of the arena that `name` fills: under tied weights the head is the embedding."""
    return EMBEDDING if name == HEAD and HEAD not in arena.parts else name


def _read_tensor(source: SafetensorsFile, entry: Entry, arena: Arena, scratch: torch.Tensor, done: set[str]) -> None:
    """Read one tensor into its place, rounding to nearest even; or, if its tied twin is there already, compare."""
    place = _place(entry.name, arena)
    flat, dtype = arena.parts[place].view(-1), SOURCE_DTYPES[entry.dtype]
    repeated = place in done
    done.add(place)
    if dtype == arena.dtype and not repeated:
        source.read_into(flat.view(torch.uint8).numpy().data)
    else:
        step = len(scratch) // dtype.itemsize
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            raw = scratch[: piece.numel() * dtype.itemsize]
            source.read_into(raw.numpy().data)
            if not repeated:
                piece.copy_(raw.view(dtype))
            elif not torch.equal(raw.view(dtype).to(arena.dtype), piece):
                raise WeightsInvalid(
                    f"{source.path}: {HEAD} differs from {EMBEDDING}, but the model ties them", field=HEAD
                )
    # The extremes of a tensor are finite exactly when all of it is: NaN wins every comparison.
    low, high = flat.aminmax()
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        bad = int((~torch.isfinite(flat)).nonzero()[0])
        message = (
            f"element {bad} is {flat[bad].item()} as {str(arena.dtype).removeprefix('torch.')}, expected finite values"
        )
        raise WeightsInvalid(f"{source.path}: tensor {entry.name}: {message}", field=entry.name)

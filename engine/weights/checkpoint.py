"""Reading a checkpoint: which files it has, what their headers promise, then every tensor cast into an arena.

All names, shapes and dtypes are checked before the first tensor is read; then threads read tensors side by side (one
alone does not keep up with a page cache or a fast disk). Extra memory is one scratch buffer of fixed size. Every fault
is refused naming the file or the tensor, with what was expected and what was found; the arena then
holds a mixture and must not serve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import file_digest
from math import prod
from pathlib import Path
from queue import SimpleQueue

import torch

from engine.errors import WeightsIncomplete, WeightsInvalid
from engine.start.progress import READING, Progress, silent
from engine.weights.arena import EMBEDDING, HEAD, Arena, Shape
from engine.weights.safetensors_file import Entry, SafetensorsFile, check_sum

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARDS = "model-*-of-*.safetensors"
SOURCE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCRATCH_BYTES = 16 * 1024 * 1024
READERS = 8


@dataclass(frozen=True, slots=True)
class Files:
    """The safetensors files of a checkpoint in reading order. home: HF name -> file; None without an index."""

    paths: tuple[Path, ...]
    home: Mapping[str, Path] | None


def find_files(path: Path) -> Files:
    """`path` is a safetensors file, or a directory with one, or with shards and their index.

    Raises `WeightsIncomplete` or `WeightsInvalid`.
    """
    with _looking_at(path):
        return _find_files(path)


@contextmanager
def _looking_at(path: Path) -> Iterator[None]:
    """What the file system refuses (a directory of somebody else, a name too long) is no fault of ours."""
    try:
        yield
    except OSError as error:
        raise WeightsIncomplete(f"{path}: cannot be looked at: {error.strerror}", field=path.name) from error


def _find_files(path: Path) -> Files:
    if path.is_file():
        return Files((path,), None)
    if not path.is_dir():
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
    path: Path,
    arena: Arena,
    scratch: torch.Tensor,
    checksums: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> None:
    """Fill `arena`, which is on the host, from a checkpoint.

    scratch: uint8[n] to read through where bytes are cast; each of `READERS` threads gets its share. checksums: file
    name -> "sha256:hex" over the whole file, for any files of the directory. progress: told of bytes of the arena.
    Raises `WeightsIncomplete` or `WeightsInvalid`.
    """
    sums = dict(checksums or {})
    with opened(path, {name: tuple(view.shape) for name, view in arena.parts.items()}) as sources, ExitStack() as stack:
        for name in sums.keys() - {source.path.name for source in sources}:
            _check_other_file(path, name, sums[name])
        pool = ThreadPoolExecutor(READERS, thread_name_prefix="weights")
        # Whatever happens, no thread reads on once the files are closed and the arena is someone else's.
        stack.callback(pool.shutdown, cancel_futures=True)
        checks = [pool.submit(file.check_sum, sums[file.path.name]) for file in sources if file.path.name in sums]
        _read_tensors(sources, arena, scratch, pool, progress)
        for check in checks:
            check.result()
        for source in sources:
            source.check_unchanged()


@contextmanager
def opened(path: Path, shapes: Mapping[str, Shape]) -> Iterator[list[SafetensorsFile]]:
    """The open files of a checkpoint that holds just these tensors (HF name -> shape), which their headers say.

    A head may stand beside tied weights. Raises `WeightsIncomplete` or `WeightsInvalid`.
    """
    files = find_files(path)
    with ExitStack() as stack:
        sources = [stack.enter_context(SafetensorsFile(file)) for file in files.paths]
        if files.home is not None:
            _check_index(sources, files.home)
        _check_headers(path, sources, shapes)
        yield sources


def _read_tensors(
    sources: Sequence[SafetensorsFile],
    arena: Arena,
    scratch: torch.Tensor,
    pool: ThreadPoolExecutor,
    progress: Progress,
) -> None:
    """Every tensor into its place, in file order as far as errors go; a tied head is compared at the end."""
    shares: SimpleQueue[torch.Tensor] = SimpleQueue()
    size = len(scratch) // READERS // 8 * 8
    for reader in range(READERS):
        shares.put(scratch[reader * size : (reader + 1) * size])
    tensors = [(source, entry) for source in sources for entry in source.entries]
    own = [(source, entry, arena.parts[entry.name]) for source, entry in tensors if entry.name in arena.parts]
    reads = [pool.submit(_read_tensor, source, entry, target, shares) for source, entry, target in own]
    done = 0
    for (source, entry, target), read in zip(own, reads, strict=True):
        read.result()
        _check_finite(source, entry, target)
        done += target.nbytes
        progress(READING, done, arena.nbytes)
    for source, entry in tensors:
        if entry.name not in arena.parts:
            _compare_tied_head(source, entry, arena.parts[EMBEDDING], scratch)


def _check_other_file(path: Path, name: str, checksum: str) -> None:
    """The checksum of a small file beside the weights; that of a weights file comes with reading it."""
    with _looking_at(path / name):
        if Path(name).name != name or not (path / name).is_file():
            raise WeightsInvalid(f"{path}: a checksum is given for {name}, which is no file of it", field=name)
        with (path / name).open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
    check_sum(path / name, found, checksum)


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


def _check_headers(path: Path, sources: Sequence[SafetensorsFile], shapes: Mapping[str, Shape]) -> None:
    """Names, dtypes and shapes are those expected; a head beside tied weights is the one extra allowed."""
    seen: dict[str, Path] = {}
    for source in sources:
        for entry in source.entries:
            name = entry.name
            if name in seen:
                raise WeightsInvalid(f"tensor {name} is in {seen[name].name} and in {source.path.name}", field=name)
            seen[name] = source.path
            # Under tied weights the head is the embedding.
            expected = shapes.get(EMBEDDING if name == HEAD and HEAD not in shapes else name)
            if expected is None:
                raise WeightsInvalid(f"{source.path}: unexpected tensor {name} {list(entry.shape)}", field=name)
            if entry.dtype not in SOURCE_DTYPES:
                message = f"expected dtype {', '.join(SOURCE_DTYPES)}, found {entry.dtype}"
                raise WeightsInvalid(f"{source.path}: tensor {name}: {message}", field=name)
            if entry.shape != expected:
                message = f"expected shape {list(expected)}, found {list(entry.shape)}"
                raise WeightsInvalid(f"{source.path}: tensor {name}: {message}", field=name)
    missing = [name for name in shapes if name not in seen]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise WeightsIncomplete(f"{path}: tensor {missing[0]}{more} is missing", field=missing[0])


def _read_tensor(
    source: SafetensorsFile, entry: Entry, target: torch.Tensor, shares: SimpleQueue[torch.Tensor]
) -> None:
    """Read one tensor into its place, rounding to nearest even."""
    flat = target.view(-1)
    if SOURCE_DTYPES[entry.dtype] == target.dtype:
        source.read_at(entry.start, flat.view(torch.uint8).numpy().data)
        return
    scratch = shares.get()
    try:
        for start, raw in _pieces(source, entry, scratch):
            flat[start : start + len(raw)].copy_(raw)
    finally:
        shares.put(scratch)


def _pieces(source: SafetensorsFile, entry: Entry, scratch: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first element, elements) of a tensor as it is in the file, as many at a time as `scratch` holds."""
    dtype = SOURCE_DTYPES[entry.dtype]
    step = len(scratch) // dtype.itemsize
    numel = prod(entry.shape)
    for start in range(0, numel, step):
        raw = scratch[: min(step, numel - start) * dtype.itemsize]
        source.read_at(entry.start + start * dtype.itemsize, raw.numpy().data)
        yield start, raw.view(dtype)


def _compare_tied_head(source: SafetensorsFile, entry: Entry, embedding: torch.Tensor, scratch: torch.Tensor) -> None:
    flat = embedding.view(-1)
    for start, raw in _pieces(source, entry, scratch[: len(scratch) // 8 * 8]):
        # In the worker's dtype: what rounds to the same weight is the same.
        if not torch.equal(raw.to(embedding.dtype), flat[start : start + len(raw)]):
            raise WeightsInvalid(f"{source.path}: {HEAD} differs from {EMBEDDING}, but the model ties them", field=HEAD)


def _check_finite(source: SafetensorsFile, entry: Entry, tensor: torch.Tensor) -> None:
    # The extremes of a tensor are finite exactly when all of it is: NaN wins every comparison.
    low, high = tensor.aminmax()
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return
    flat = tensor.view(-1)
    bad = int((~torch.isfinite(flat)).nonzero()[0])
    found = f"{flat[bad].item()} as {str(tensor.dtype).removeprefix('torch.')}"
    raise WeightsInvalid(
        f"{source.path}: tensor {entry.name}: element {bad} is {found}, expected finite values", field=entry.name
    )

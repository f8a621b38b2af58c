"""`rollout-worker checksum PATH`: the digest that a worker gives for a checkpoint, and the checksums that it takes.

The digest is made as an update makes it, by reading, casting and checking the weights: it is what `weights_prepared`
and `weights_committed` carry for this checkpoint, on a worker of the same dtype.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from hashlib import file_digest
from pathlib import Path

from engine.errors import EngineError
from rollout.command.parser import NAME

DTYPES = ("float32", "bfloat16")
OTHERS = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json")
"""Files beside the weights whose change would be a change of the model, where they are there."""


def main(argv: Sequence[str]) -> int:
    """The exit code: 0, or 1 for a checkpoint that a worker would refuse. Exits with 2 if an option is wrong."""
    parser = argparse.ArgumentParser(
        prog=f"{NAME} checksum",
        description="Reads and checks a checkpoint as a worker does, and prints its digest and its files' checksums.",
        allow_abbrev=False,
    )
    parser.add_argument("path", type=Path, help="checkpoint directory")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the worker's; without it both (float32 is what it has on a CPU)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one object: digest by dtype, and checksums for prepare_weights"
    )
    given = parser.parse_args(argv)
    try:
        digests = {dtype: digest(given.path, dtype) for dtype in ([given.dtype] if given.dtype else DTYPES)}
        checksums = file_checksums(given.path)
    except (EngineError, OSError) as error:
        print(f"{NAME} checksum: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(json.dumps({"digest": digests, "checksums": checksums}, indent=2))
        return 0
    width = max(map(len, [*digests, *checksums]))
    for title, table in (("digest", digests), ("file  ", checksums)):
        for name, text in table.items():
            print(f"{title}  {name:{width}}  {text}")
    return 0


def digest(path: Path, dtype: str) -> str:
    """ "sha256:hex". Takes host memory for the model in `dtype`. Raises WeightsError, OutOfMemory."""
    # Only now torch: not for --help, nor for a wrong option.
    import torch

    from engine.memory.memory import Memory
    from engine.model.config import read_model_config
    from engine.start.build import DTYPES as KINDS
    from engine.weights.update import Weights

    weights = Weights(read_model_config(path), KINDS[dtype], Memory(torch.device("cpu")))
    return weights.prepare(str(path), 0).digest


def file_checksums(path: Path) -> dict[str, str]:
    """File name -> "sha256:hex", as `prepare_weights` takes them: the weights and what describes them."""
    from engine.weights.checkpoint import find_files

    files = {*find_files(path).paths, *(path / name for name in OTHERS if (path / name).is_file())}
    sums = {}
    for file in sorted(files):
        with file.open("rb") as source:
            sums[file.name] = f"sha256:{file_digest(source, 'sha256').hexdigest()}"
    return sums

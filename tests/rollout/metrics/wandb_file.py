"""Reads the rows of a W&B run back from its `.wandb` file: the log format of LevelDB around protobuf records.

A file is a header of 7 bytes and then blocks of 32 KiB. In a block stand fragments: checksum (4 bytes, little-endian),
length (2), kind (1: whole, 2: first, 3: middle, 4: last), data. What is left of a block, if less than 7 bytes, is
padding.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK = 32 * 1024
FILE_HEADER = 7
FRAGMENT = struct.Struct("<IHB")
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[Any]:
    """Each record of the file, as wandb's own protobuf message."""
    data, at, parts = path.read_bytes(), FILE_HEADER, b""
    while at + FRAGMENT.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < FRAGMENT.size:
            at += left
            continue
        _, length, kind = FRAGMENT.unpack_from(data, at)
        at += FRAGMENT.size
        parts = data[at : at + length] if kind in (WHOLE, FIRST) else parts + data[at : at + length]
        at += length
        if kind in (WHOLE, LAST):
            yield wandb_internal_pb2.Record.FromString(parts)


def rows(path: Path) -> list[dict[str, Any]]:
    """What was logged, in order, with `_step`, `_runtime` and `_timestamp`."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records(path)
        if record.HasField("history")
    ]


def axes(path: Path) -> dict[str, str]:
    """Name, or pattern of names, to the axis that it is drawn over."""
    found = {}
    steps = []
    for record in records(path):
        if record.HasField("metric"):
            steps.append(record.metric.name or record.metric.glob_name)
            if record.metric.step_metric:
                found[record.metric.glob_name or record.metric.name] = record.metric.step_metric
    return found

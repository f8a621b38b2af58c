"""The bytes of every message, for implementations in other languages.

    python -m tests.protocols.golden_vectors

rewrites tests/protocols/golden/: one JSON file per kind of message with its frames in hex and what they mean, how a
message looks in chunks, and frames that must be refused, with the error's code and field.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from protocols import Value, encode, split
from tests.protocols import samples
from tests.protocols.refused import refused

FOLDER = Path(__file__).parent / "golden"


def meaning(value: Any) -> Any:
    """A message as JSON. Arrays, bytes and non-finite numbers, which JSON lacks, are spelled out."""
    if isinstance(value, Value):
        return meaning(value.model_dump())
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": list(value.shape), "values": meaning(value.ravel().tolist())}
    if isinstance(value, dict):
        return {key: meaning(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [meaning(item) for item in value]
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value


def hexed(frames: list[Any]) -> list[str]:
    return [bytes(frame).hex() for frame in frames]


def message_files() -> dict[str, Any]:
    files: dict[str, Any] = {}
    for side, messages in (("request", samples.REQUESTS), ("reply", samples.REPLIES)):
        for kind, message in messages.items():
            files[f"{kind}.json"] = {"side": side, "meaning": meaning(message), "frames": hexed(encode(message))}
    failed = samples.REPLIES["trajectory_done"].model_copy(update={"record": samples.failed_record()})
    files["trajectory_done_failed.json"] = {
        "side": "reply",
        "meaning": meaning(failed),
        "frames": hexed(encode(failed)),
    }
    return files


def chunked_file() -> Any:
    whole = encode(samples.REPLIES["turn_done"])
    return {
        "chunk_bytes": 100,
        "whole": hexed(whole),
        "packets": [hexed(packet.frames) for packet in split(whole, 100, number=5, message_id="7")],
    }


def refused_file() -> Any:
    return [
        {"wrong": wrong, "code": "bad_request", "field": field, "id": request_id, "frames": hexed(frames)}
        for wrong, field, request_id, frames in refused()
    ]


def files() -> dict[str, str]:
    """Name and text of every golden file."""
    everything = message_files() | {"chunked.json": chunked_file(), "refused.json": refused_file()}
    return {name: json.dumps(content, indent=1, ensure_ascii=True) + "\n" for name, content in everything.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for stale in FOLDER.glob("*.json"):
        stale.unlink()
    for name, text in files().items():
        (FOLDER / name).write_text(text)

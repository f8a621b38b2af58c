"""What kept a worker from starting, in one sentence with what to do about it."""

from __future__ import annotations

from typing import Final

from engine.errors import EngineError, OutOfMemory, WeightsError

WORKER: Final = "pip install 'rollout-worker[worker]' (in a checkout: pip install -e '.[worker]')"
AGAIN: Final = "make the copy again"
OURS: Final = ("engine", "protocols", "rollout")
CURES: Final = (
    ("Git LFS pointer", "fetch it with git lfs pull"),
    ("Permission denied", "let this user read it"),
    ("cut short", AGAIN),
    ("bytes, expected", AGAIN),
    ("too few for a safetensors header", AGAIN),
    ("No such file", AGAIN),
    ("cannot be read as JSON", AGAIN),
    ("which has it not", AGAIN),
    ("is missing", f"{AGAIN}, or save it with its own config.json"),
    ("expected shape", f"{AGAIN}, or save it with its own config.json"),
    ("expected finite values", "what wrote it had diverged: take an earlier one"),
    ("holds no safetensors file", "save it as safetensors, as save_pretrained does"),
    ("quantised", "take the one it was made from"),
)
"""What is said of a checkpoint, and what helps."""


def advice(error: Exception) -> str:
    """error: of options, of files or of the engine's build."""
    text = " ".join(str(error).split())
    match error:
        case OutOfMemory(field="kv_bytes" | "num_blocks"):
            return f"{text}: give --kv-tokens or --kv-memory more, or lower --max-running or --max-step-tokens"
        case OutOfMemory(field="weights"):
            return f"{text}: free some, or take a smaller model"
        case OutOfMemory():
            return f"{text}: lower --kv-tokens, --max-running, --max-step-tokens or --max-context, or free the device"
        case WeightsError():
            cure = next((cure for sign, cure in CURES if sign in text), None)
            return f"--weights {text}{f': {cure}' if cure else ''}"
        case EngineError(field="max_context"):
            return f"{text}: lower --max-context"
        case EngineError() if "killed by signal 9" in text:
            return f"{text}: the kernel may have run out of memory, dmesg tells; give it more, or take a smaller model"
        case ModuleNotFoundError(name=str(name)) if name.split(".")[0] not in OURS:
            return f"{name} is not installed; a worker takes more than a client: {WORKER}"
        case PermissionError() if error.filename is not None:
            return f"{error.filename}: permission denied: let this user read it"
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
    return text

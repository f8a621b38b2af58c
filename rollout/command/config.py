"""The worker's options and what they may be. Where their values come from is said in options.py.

Each field's `json_schema_extra` says which group of `--help` it belongs to and its unit. No option holds a secret:
keys are in files that options name, so that a configuration can be printed and kept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from protocols.fields import Limits
from rollout.command import gpu
from rollout.wire.curve import is_local

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(value: Any) -> Any:
    """`512M`, `2GiB`, `1073741824`: bytes, in powers of 1024."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+|\d+\.\d+(?=\s*[KMGT]))\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{value!r} is no size: write 512M, 2GiB or a number of bytes")
    return int(float(match[1]) * UNITS[match[2].upper()])


def shown_size(size: int) -> str:
    """`2GiB`: the text that `parse_bytes` reads back as this number."""
    power = 0
    while size and size % 1024 == 0 and power < 4:
        size, power = size // 1024, power + 1
    return f"{size}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def flag(name: str) -> str:
    """An option's name as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def split(value: Any) -> Any:
    """A list that is written as text has commas, except for that of `name=module:Class,process`."""
    return [part.strip() for part in re.split(r",(?!\s*process\s*(?:,|$))", value)] if isinstance(value, str) else value


def filled(value: Any) -> Any:
    """An empty text, as `--weights "$UNSET"` gives it, would be the working directory."""
    if value == "":
        raise ValueError("is empty")
    return value


def check_env(spec: str) -> str:
    if re.fullmatch(r"[^\s=,]+=[^\s=:,]+:[^\s=:,]+(,process)?", spec) is None:
        raise ValueError(f"{spec!r} must read name=module:Class or name=module:Class,process")
    return spec


def check_module(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no module: write it as Python imports it, package.module")
    return name


def check_address(address: str) -> str:
    tcp = re.fullmatch(r"tcp://(?:[^:/\[\]\s]+|\[[^\[\]\s]+\]):(\d+|\*)", address)
    if tcp is None and re.fullmatch(r"ipc://.+", address) is None:
        raise ValueError(f"{address!r} must read tcp://HOST:PORT or ipc://PATH")
    if tcp is not None and tcp[1] != "*" and int(tcp[1]) > 65535:
        raise ValueError(f"{address}: a port is at most 65535")
    return address


def at_home(path: Path) -> Path:
    """`~`, which shells leave as it is in files, variables and behind an equals sign."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None


Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, lt=2**63)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
File = Annotated[Path, BeforeValidator(filled), AfterValidator(at_home)]
Text = Annotated[str, BeforeValidator(filled)]
Address = Annotated[str, AfterValidator(check_address)]
Env = Annotated[str, AfterValidator(check_env)]
Module = Annotated[str, AfterValidator(check_module)]


def option(default: Any, group: str, description: str, *, unit: str = "", **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group, "unit": unit}, **limits)


class WorkerConfig(BaseSettings):
    """Raises ValidationError, naming the option. What is not given has its default."""

    model_config = SettingsConfigDict(env_prefix="ROLLOUT_WORKER_", env_ignore_empty=True, frozen=True, extra="forbid")

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is handed over: options.py puts the sources together, and remembers which said what."""
        return (sources["init_settings"],)

    weights: File = option(
        ..., "model", "checkpoint directory: config.json, safetensors; tokenizer.json only where text is used"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "model", "where the model runs; auto: on a GPU if there is one and what it takes is installed"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "model", "of weights and KV cache; auto: float32 on cpu, bfloat16 on cuda"
    )
    weight_version: int = option(0, "model", "version of the weights loaded at start", ge=-(2**63), lt=2**63)

    max_context: int | None = option(
        None, "engine", "longest trajectory; without it the checkpoint's, at most 4096", unit="tokens", gt=1
    )
    max_running: int = option(64, "engine", "requests in one step", unit="requests", gt=0)
    max_step_tokens: int = option(2048, "engine", "tokens computed in one step", unit="tokens", gt=0)
    kv_tokens: int | None = option(
        None, "engine", "KV cache; without it all that run can be longest, if memory is there", unit="tokens", gt=0
    )
    kv_memory: Bytes | None = option(None, "engine", "KV cache, instead of --kv-tokens", unit="bytes, or 2GiB")
    prefix_cache: bool = option(True, "engine", "share the KV of equal prefixes")
    admission: Literal["whole", "open"] = option(
        "whole", "engine", "run no more trajectories than fit into the KV cache to their ends; open: as many as may"
    )
    overlap: bool = option(True, "engine", "launch a step before the result of the one before is read")
    decode_path: Literal["auto", "graph", "eager"] = option(
        "auto", "engine", "steps replay CUDA graphs or launch each kernel; auto: graphs on cuda"
    )
    engine_process: Literal["auto", "thread", "process"] = option(
        "auto",
        "engine",
        "run the engine in a thread of the worker or in a process that nothing else slows; auto: process on cuda",
    )

    bind: Address = option("tcp://127.0.0.1:5555", "address", "ZeroMQ address; port 0 is chosen by the system")
    curve_secret: File | None = option(
        None, "address", "CURVE key file (.key_secret) of the worker; required beyond this machine"
    )
    curve_clients: File | None = option(
        None, "address", "directory of the .key files of clients to let in; without it all that know our public key"
    )
    heartbeat_timeout: Seconds = option(
        60.0, "address", "a host that has gone silent on the network is disconnected after this", unit="s", le=1e6
    )
    ready_file: File | None = option(None, "address", "write address, process id and boot id here, as JSON, when ready")

    client_timeout: Seconds = option(
        3.0, "clients", "work of a client whose connection is gone is kept this long, then cancelled", unit="s"
    )
    max_trajectories: int = option(1024, "clients", "trajectories run at once; the others wait", gt=0)
    max_waiting: int = option(65536, "clients", "trajectories that may wait; more are refused as overloaded", gt=0)
    result_memory: Bytes = option(
        2 * 2**30, "clients", "results kept until acknowledged, running ones at their largest", unit="bytes, or 2GiB"
    )
    window: Bytes = option(2 * 2**20, "clients", "results on their way to one client", unit="bytes, or 2MiB")

    env: Annotated[tuple[Env, ...], NoDecode, BeforeValidator(split)] = option(
        (),
        "environments",
        "name=module:Class[,process] of an environment, from PYTHONPATH or the working directory; may be repeated",
    )
    tools: Annotated[tuple[Module, ...], NoDecode, BeforeValidator(split)] = option(
        (), "environments", "module whose functions the environment tools offers; may be repeated (docs/chat.md)"
    )
    env_processes: int | None = option(
        None,
        "environments",
        "processes for code that does not run in the worker, half for environments and half for tools; without it one "
        "for each processor, at least 16",
        ge=2,
    )

    metrics_file: File | None = option(
        None,
        "metrics",
        "numbers as JSON lines; without it rollout-metrics/START-PID.jsonl in the working directory",
    )
    metrics_interval: Seconds = option(
        5.0, "metrics", "between two looks at engine, weights, memory and wire", unit="s"
    )
    metrics_port: int | None = option(
        None, "metrics", "serve /metrics (Prometheus), /healthz and /readyz here; 0: any free port", ge=0, lt=2**16
    )
    metrics_host: Text = option("127.0.0.1", "metrics", "interface of --metrics-port; 0.0.0.0 for other machines")
    self_check: bool = option(
        False, "metrics", "score one trajectory of each round again and report how far its logprobs are off"
    )
    live_line: bool = option(True, "metrics", "one line of what goes on, where stderr is a terminal")
    wandb_project: Text | None = option(None, "metrics", "also draw the numbers in this W&B project (extra: wandb)")
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = option(
        "auto", "metrics", "auto: WANDB_MODE, else online; offline where that fails"
    )
    wandb_entity: Text | None = option(None, "metrics", "W&B team or user")
    wandb_name: Text | None = option(None, "metrics", "name of the W&B run")
    wandb_group: Text | None = option(None, "metrics", "W&B group, such as that of the trainer's run")
    wandb_resume_id: Text | None = option(None, "metrics", "id of the W&B run to go on with, or to begin")

    drain_timeout: Seconds = option(30.0, "shutdown", "running work may go on after SIGTERM", unit="s")
    ack_timeout: Seconds = option(
        1.0, "shutdown", "after that, what is left may take to be ended, delivered and acknowledged", unit="s"
    )

    log_level: Literal["debug", "info", "warning", "error"] = option("info", "logs", "least severe log line written")
    log_format: Literal["text", "json"] = option("text", "logs", "lines to read, or one JSON object a line")

    @model_validator(mode="after")
    def _fits_together(self) -> WorkerConfig:
        if self.kv_tokens is not None and self.kv_memory is not None:
            raise ValueError("--kv-tokens and --kv-memory say the same thing: give one of them")
        if self.curve_clients is not None and self.curve_secret is None:
            raise ValueError("--curve-clients needs --curve-secret")
        if self.curve_secret is None and not is_local(self.bind):
            raise ValueError(
                f"--bind {self.bind} can be reached from other machines: give --curve-secret (a key pair is made by "
                "python -c \"import zmq.auth; zmq.auth.create_certificates('.', 'worker')\"), or bind 127.0.0.1"
            )
        if self.place == "cuda" and self.dtype == "float32":
            raise ValueError("--dtype float32 is not served on cuda: leave it out, or choose --device cpu")
        if self.place == "cpu" and self.decode_path == "graph":
            raise ValueError("--decode-path graph needs a GPU, and --device is cpu or finds none")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"--max-step-tokens {self.max_step_tokens} must be at least --max-running {self.max_running}"
            )
        return self

    @property
    def place(self) -> Literal["cpu", "cuda"]:
        """What `device` means on this machine."""
        if self.device != "auto":
            return self.device
        return "cuda" if gpu.visible() and gpu.lacking() is None else "cpu"

    @property
    def model_dtype(self) -> str:
        """What `dtype` means on this device."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if self.place == "cuda" else "float32"

    @property
    def in_process(self) -> bool:
        """Does the engine run in a process of its own?"""
        return self.engine_process == "process" or (self.engine_process == "auto" and self.place == "cuda")

    @property
    def limits(self) -> Limits:
        return Limits(window_bytes=self.window, result_bytes=self.result_memory)

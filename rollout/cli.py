"""The `rollout-worker` command: options to a configuration, and what goes wrong to a sentence and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, UnionType
from typing import Any, Literal, NoReturn

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from rollout.config import WorkerConfig
from rollout.start import Loaded, StartError, run_worker

NAME = "rollout-worker"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 for what goes wrong. Exits with 2, argparse's code, if an option is wrong."""
    return run(parse(sys.argv[1:] if argv is None else argv), _load)


def run(config: WorkerConfig, load: Callable[[WorkerConfig], Loaded]) -> int:
    """A worker from its start to its end, over the engine that `load` makes. Returns the exit code."""
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=config.log_level.upper(), stream=sys.stderr
    )
    # Modules named by --env tend to be in the working directory, where a console script does not look.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    # Until there is something to drain, either signal simply ends the start.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        return run_worker(config, load)
    except StartError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 1


def _load(config: WorkerConfig) -> Loaded:
    # Torch takes seconds to import: only once the options and the address are known to be good.
    from rollout.load import load

    return load(config)


def parse(argv: Sequence[str]) -> WorkerConfig:
    """Exits with code 2 and a message if an option is wrong."""
    parser = build_parser()
    given = vars(parser.parse_args(argv))
    try:
        return WorkerConfig(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        option = _flag(name) if name else ""
        if first["type"] == "missing":
            parser.error(f"{option} is required")
        if name and name not in given:
            option = f"ROLLOUT_WORKER_{name.upper()}"
        parser.error(f"{option}: {_reason(first)}" if option else _reason(first))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME,
        usage=f"{NAME} --weights PATH [options]; {NAME} --help lists them",
        description="Runs batches of agent trajectories for a trainer, on one engine, over ZeroMQ.",
        epilog="Every option is also read from the environment: --kv-tokens from ROLLOUT_WORKER_KV_TOKENS.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in WorkerConfig.model_fields.items():
        extra = typing.cast(dict[str, str], field.json_schema_extra)
        title = extra["group"]
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        group.add_argument(_flag(name), **_argument(field, extra["unit"]))
    return parser


def _argument(field: FieldInfo, unit: str) -> dict[str, Any]:
    """What argparse needs to know; values stay text, the model reads them."""
    kind = field.annotation
    notes = [unit] if unit else []
    if not field.is_required() and field.default not in (None, ()):
        notes.append(f"default {_shown(field.default, unit)}")
    text = f"{field.description} ({', '.join(notes)})" if notes else str(field.description)
    arguments: dict[str, Any] = {"help": text.replace("%", "%%")}
    if kind is bool:
        return arguments | {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kind) is Literal:
        return arguments | {"choices": typing.get_args(kind)}
    if typing.get_origin(kind) is tuple:
        return arguments | {"action": "append", "metavar": "NAME=MODULE:CLASS"}
    return arguments | {"metavar": _metavar(kind, unit)}


def _shown(default: Any, unit: str) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if unit.startswith("bytes"):
        size, power = default, 0
        while size % 1024 == 0:
            size, power = size // 1024, power + 1
        return f"{size}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _metavar(kind: Any, unit: str) -> str:
    if unit.startswith("bytes"):
        return "SIZE"
    if unit == "s":
        return "SECONDS"
    members = (
        typing.get_args(kind) if isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union else (kind,)
    )
    return "N" if int in members else "PATH" if Path in members else "ADDRESS" if kind is str else "TEXT"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _reason(error: Any) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _leave(number: int, _: FrameType | None) -> NoReturn:
    logging.getLogger(__name__).info("%s before the worker was ready", signal.Signals(number).name)
    sys.exit(0)

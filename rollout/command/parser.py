"""What argparse is told: the options of `WorkerConfig` in their groups. Values stay text; the model reads them."""

from __future__ import annotations

import argparse
import typing
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal

from pydantic.fields import FieldInfo

from rollout.command.config import WorkerConfig, flag, shown_size

NAME = "rollout-worker"
COMMANDS = ("doctor", "checksum")
EPILOG = """\
An option can also be given as an environment variable, --kv-tokens as ROLLOUT_WORKER_KV_TOKENS, or in the file of
--config, as "kv_tokens: 100000". The command line wins over the environment, the environment over the file.

other commands:
  rollout-worker doctor [options]   check this machine, and a checkpoint if --weights is given
  rollout-worker checksum PATH      print the digest of a checkpoint and the checksums of its files
"""


def build_parser(command: str = "", description: str = "", epilog: str = EPILOG) -> argparse.ArgumentParser:
    """command: of those that take the worker's options; the worker's own has none."""
    called = f"{NAME} {command}".rstrip()
    parser = argparse.ArgumentParser(
        prog=called,
        usage=f"{NAME} {command or '--weights PATH'} [options]; {called} --help lists them",
        description=description or "Runs batches of agent trajectories for a trainer, on one engine, over ZeroMQ.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file with options, as --print-config writes it"
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in WorkerConfig.model_fields.items():
        extra = typing.cast(dict[str, str], field.json_schema_extra)
        title = extra["group"]
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        group.add_argument(flag(name), **_argument(name, field, extra["unit"]))
    return parser


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """Every option that the parser knows."""
    return [text for action in parser._actions for text in action.option_strings]


def _argument(name: str, field: FieldInfo, unit: str) -> dict[str, Any]:
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
        return arguments | {"action": "append", "metavar": "MODULE" if name == "tools" else "NAME=MODULE:CLASS"}
    return arguments | {"metavar": _metavar(kind, unit)}


def _shown(default: Any, unit: str) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if unit.startswith("bytes"):
        return shown_size(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def _metavar(kind: Any, unit: str) -> str:
    if unit.startswith("bytes"):
        return "SIZE"
    if unit == "s":
        return "SECONDS"
    union = isinstance(kind, UnionType) or typing.get_origin(kind) is typing.Union
    members = {_bare(member) for member in (typing.get_args(kind) if union else (kind,))}
    return "N" if int in members else "PATH" if Path in members else "TEXT"


def _bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind

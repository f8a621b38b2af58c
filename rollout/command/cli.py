"""The `rollout-worker` command: options to a configuration, and what goes wrong to a sentence and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from protocols.base import suggestion
from rollout.command.config import WorkerConfig
from rollout.command.config_file import write_config
from rollout.command.logs import set_up_logs
from rollout.command.options import OptionError, Options, read_options
from rollout.command.parser import COMMANDS, NAME, build_parser, flags
from rollout.command.start import Loaded, StartError, run_worker
from rollout.command.versions import ours


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 1 for what goes wrong. Exits with 2, argparse's code, if an option is wrong."""
    argv = sys.argv[1:] if argv is None else argv
    # A worker's options all begin with a dash, so a word in front is a command.
    match list(argv[:1]):
        case ["checksum"]:
            from rollout.command import checksum

            return checksum.main(argv[1:])
        case ["doctor"]:
            from rollout.command.doctor import command as doctor

            return doctor.main(argv[1:])
    parser = _worker_parser()
    given = parse_known(parser, argv)
    print_config = given.pop("print_config", False)
    options = read(parser, given)
    if print_config:
        print(f"# {NAME} {ours()}\n{write_config(options.config, options.origins)}", end="")
        return 0
    return run(options.config, _load)


def run(config: WorkerConfig, load: Callable[[WorkerConfig], Loaded]) -> int:
    """A worker from its start to its end, over the engine that `load` makes. Returns the exit code."""
    set_up_logs(config.log_level, config.log_format)
    find_modules_here()
    # Until there is something to drain, either signal simply ends the start.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    try:
        return run_worker(config, load)
    except StartError as error:
        if config.log_format == "json":
            logging.getLogger(NAME).critical("%s", error)
        else:
            print(f"{NAME}: {error}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str]) -> WorkerConfig:
    """Exits with code 2 and a message if an option is wrong."""
    parser = _worker_parser()
    return read(parser, parse_known(parser, argv)).config


def parse_known(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Option name -> value as given. Exits with code 2 for what the parser does not know, with a suggestion."""
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        name = next((part for part in unknown if part.startswith("-")), unknown[0]).partition("=")[0]
        hint = suggestion(name, [*flags(parser), *COMMANDS])
        if not (hint or name.startswith("-")):
            hint = "; a checkpoint is given as --weights PATH"
        before = ["", *argv][list(argv).index(unknown[0])]
        if unknown[0] in ("yes", "no", "on", "off", "true", "false") and f"--no-{before[2:]}" in flags(parser):
            hint = f"; {before} takes no value: write {before} or --no-{before[2:]}"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return vars(found)


def read(parser: argparse.ArgumentParser, given: dict[str, Any], **fallback: Any) -> Options:
    """What is given, the environment and the file as one. Exits with code 2 and a message if something is wrong."""
    file: Path | None = given.pop("config", None)
    try:
        return read_options(given, file, fallback=fallback)
    except OptionError as error:
        parser.error(str(error))


def find_modules_here() -> None:
    """Modules named by --env tend to be in the working directory, where a console script does not look."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def _worker_parser() -> argparse.ArgumentParser:
    parser = build_parser()
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print every option, its value and where that came from, as YAML for --config, and end",
    )
    parser.add_argument("--version", action="version", version=f"{NAME} {ours()}")
    return parser


def _load(config: WorkerConfig) -> Loaded:
    # Torch takes seconds to import: only once the options and the address are known to be good.
    from rollout.command.load import load

    return load(config)


def _leave(number: int, _: FrameType | None) -> NoReturn:
    try:
        logging.getLogger(__name__).info("%s before the worker was ready", signal.Signals(number).name)
    finally:
        # An exception would be raised wherever the start happens to be: torch, as it is imported, aborts on one.
        os._exit(0)

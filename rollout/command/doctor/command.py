"""The command itself: the worker's options in, a line for each finding out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from rollout.command.config import WorkerConfig
from rollout.command.doctor import checkpoint, device, environments, machine, network, software, watching
from rollout.command.doctor.finding import Finding, safely

EPILOG = """\
Takes the worker's options, from its file and its variables too, and checks what they ask for. Without --weights no
checkpoint is looked at.

Exit code: 0, or 1 if a check failed; warnings do not count. 2 for an option that is wrong.
"""


def main(argv: Sequence[str]) -> int:
    from rollout.command.cli import find_modules_here, parse_known, read
    from rollout.command.parser import build_parser

    parser = build_parser("doctor", "Checks whether a worker with these options can run on this machine.", EPILOG)
    options = read(parser, parse_known(parser, argv), weights=Path())
    find_modules_here()
    levels = []
    for finding in examine(options.config, with_checkpoint="weights" in options.origins):
        print(finding.line(), flush=True)
        levels.append(finding.level)
    print(f"{levels.count('ok')} ok, {levels.count('warn')} warn, {levels.count('fail')} fail")
    return 1 if "fail" in levels else 0


def examine(config: WorkerConfig, *, with_checkpoint: bool) -> Iterator[Finding]:
    """From what everything stands on to what only some need. A check that breaks is a finding as well."""
    yield from safely("packages", partial(software.check, config))
    yield from safely("GPU", partial(device.check, config))
    yield from safely("memory", machine.check)
    if with_checkpoint:
        yield from safely("checkpoint", partial(checkpoint.check, config))
    yield from safely("environments", partial(environments.check, config))
    yield from safely("address", partial(network.check, config))
    yield from safely("metrics", partial(watching.check, config))

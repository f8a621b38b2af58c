"""Environments and tools: can the worker import what its options name? Each that it cannot is a finding of its own."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.command.advice import advice
from rollout.command.config import WorkerConfig
from rollout.command.doctor.finding import Finding
from rollout.command.load import environments_of


def check(config: WorkerConfig) -> Iterator[Finding]:
    each = [((spec,), ()) for spec in config.env] + [((), (module,)) for module in config.tools]
    alone = [look(config.model_copy(update={"env": env, "tools": tools})) for env, tools in each]
    # Those that are sound may yet not go together.
    yield from [finding for finding in alone if finding.level == "fail"] or [look(config)]


def look(config: WorkerConfig) -> Finding:
    try:
        names = environments_of(config).names
    except Exception as error:
        return Finding("fail", "environments", advice(error))
    return Finding("ok", "environments", ", ".join(names))

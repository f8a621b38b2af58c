"""Environments by name. The wire carries names only; the code behind a name was chosen where the worker started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protocols import fields
from rollout.environments.base import EnvironmentFactory

ENTRY_POINTS = "rollout_worker.environments"


class Registry:
    """`scripted`, `remote`, what the command line names, and installed entry points (in that order of precedence)."""

    @staticmethod
    def load(specs: Sequence[str] = ()) -> Registry:
        """specs: `name=module:Class`, one per `--env`. Raises ValueError (a spec) or ImportError naming the spec."""
        raise NotImplementedError

    def __init__(self, plugins: Mapping[str, EnvironmentFactory]) -> None:
        raise NotImplementedError

    @property
    def names(self) -> tuple[str, ...]:
        raise NotImplementedError

    def resolve(self, environment: fields.Environment) -> EnvironmentFactory:
        """The factory for a submitted environment. Raises BadRequest, naming what is known, for an unknown name."""
        raise NotImplementedError

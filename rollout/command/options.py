"""From the command line, the environment and a file to one configuration that knows where each value came from.

The command line wins over the environment, the environment over the file, the file over the defaults. A name that is
no option is refused wherever it stands, since an option that is silently ignored is a worker that runs otherwise than
asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from protocols.base import suggestion
from rollout.command.config import WorkerConfig, flag
from rollout.command.config_file import ConfigFileError, read_file

PREFIX: Final = "ROLLOUT_WORKER_"
FILE_VARIABLE: Final = f"{PREFIX}CONFIG"
SERVICE_LINK: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_[A-Z]+)?$")
"""Variables that Kubernetes gives to every pod beside a service that is called rollout-worker."""
SERVICE_URL: Final = re.compile(r"(tcp|udp|sctp)://\S+$")


class OptionError(Exception):
    """An option is wrong; the message names it as it was given, and where."""


@dataclass(frozen=True, slots=True)
class Options:
    """origins: option name -> where its value came from; an option that is not there has its default."""

    config: WorkerConfig
    origins: Mapping[str, str]


def read_options(
    given: Mapping[str, Any], file: Path | None = None, *, fallback: Mapping[str, Any] | None = None
) -> Options:
    """given: option name -> value, from the command line. fallback: for options that are given nowhere.

    Raises OptionError.
    """
    check_variables(os.environ)
    file = file or _file_variable()
    origins, blame, values = dict[str, str](), dict[str, str](), dict[str, Any](fallback or {})

    def put(name: str, value: Any, origin: str, called: str) -> None:
        values[name], origins[name], blame[name] = value, origin, called

    for name, (value, line) in _from_file(file).items():
        put(name, value, f"{file}:{line}", f"{file}:{line}: {name}")
    for name, value in EnvSettingsSource(WorkerConfig)().items():
        variable = f"{PREFIX}{name.upper()}"
        put(name, value, f"environment {variable}", variable)
    for name, value in given.items():
        put(name, value, "command line", flag(name))
    try:
        return Options(WorkerConfig(**values), origins)
    except ValidationError as error:
        raise OptionError("; ".join(_sentence(one, blame) for one in error.errors(include_url=False))) from None


def check_variables(environ: Mapping[str, str]) -> None:
    """Raises OptionError for a variable that looks like an option and is none."""
    known = {FILE_VARIABLE, *(f"{PREFIX}{name.upper()}" for name in WorkerConfig.model_fields)}
    for name, value in environ.items():
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        if not (SERVICE_LINK.search(name) or (name.endswith("_PORT") and SERVICE_URL.match(value))):
            raise OptionError(f"the environment has {name}, which is no option{suggestion(name.upper(), known)}")


def _file_variable() -> Path | None:
    name = os.environ.get(FILE_VARIABLE)
    return Path(name).expanduser() if name else None


def _from_file(file: Path | None) -> dict[str, tuple[Any, int]]:
    if file is None:
        return {}
    try:
        entries = read_file(file)
    except ConfigFileError as error:
        raise OptionError(str(error)) from None
    values = {}
    for name, entry in entries.items():
        field = WorkerConfig.model_fields.get(name)
        if field is None:
            raise OptionError(f"{file}:{entry.line}: {name} is no option{suggestion(name, WorkerConfig.model_fields)}")
        # Pydantic would read `yes` as 1, and YAML reads yes, no, on and off as such.
        if isinstance(entry.value, bool) and field.annotation is not bool:
            raise OptionError(f"{file}:{entry.line}: {name}: is {str(entry.value).lower()}; put the word in quotes")
        values[name] = (entry.value, entry.line)
    return values


def _sentence(error: Any, blame: Mapping[str, str]) -> str:
    reason = str(error["msg"]).removeprefix("Value error, ")
    if not error["loc"]:
        return reason
    name = str(error["loc"][0])  # what follows is where in a list
    if error["type"] == "missing":
        return f"{flag(name)} is required"
    if reason.startswith("Input should"):
        should = reason.removeprefix("Input ").partition(", unable")[0].replace("a valid tuple", "a list")
        reason = f"{should}, not {error['input']!r}"
    return f"{blame.get(name, flag(name))}: {reason}"

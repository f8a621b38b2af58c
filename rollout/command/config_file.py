"""Options in a YAML file: read with the line of each, and written so that what is printed can be read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollout.command.config import WorkerConfig, shown_size


class ConfigFileError(Exception):
    """The message names the file, where there is one the line and the key, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Entry:
    """line: counted from 1."""

    value: Any
    line: int


def read_file(path: Path) -> dict[str, Entry]:
    """Option name -> its entry; a key may be written `kv_tokens` or `kv-tokens`. Raises ConfigFileError.

    That a key is an option, and its value one that the option can have, is looked at by the caller.
    """
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except OSError as error:
        raise ConfigFileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{path}{_place(error)}") from None
    except RecursionError:
        raise ConfigFileError(f"{path}: is nested too deeply") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigFileError(f"{path}: must hold `option: value` lines, not one value or a list")
    entries: dict[str, Entry] = {}
    for key, node in root.value:
        line = key.start_mark.line + 1
        name = str(key.value).replace("-", "_")
        if name in entries:
            raise ConfigFileError(f"{path}:{line}: {key.value} is given before, in line {entries[name].line}")
        try:
            value = loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigFileError(f"{path}:{line}: {key.value}: {_problem(error)}") from None
        entries[name] = Entry(value, line)
    return entries


def write_config(config: WorkerConfig, origins: Mapping[str, str]) -> str:
    """The configuration as YAML that `read_file` takes, with where each value came from as a comment.

    origins: option name -> where; whatever is not there has its default.
    """
    rows: list[tuple[str, str]] = []
    group = ""
    for name, field in WorkerConfig.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        if extra["group"] != group:
            group = str(extra["group"])
            rows.append((f"# {group}", ""))
        value = config.model_dump(mode="json", include={name})[name]
        if value is not None and str(extra["unit"]).startswith("bytes"):
            value = shown_size(value)
        rows.append((f"{name}: {_scalar(value)}", origins.get(name, "default")))
    width = max(len(left) for left, right in rows if right and len(left) < 60)
    return "".join(f"{left:{width}}  # {right}\n" if right else f"{left}\n" for left, right in rows)


def _scalar(value: Any) -> str:
    """On one line, whatever it is."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("...\n").rstrip("\n")


def _place(error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f"{f':{mark.line + 1}' if mark else ''}: is no YAML: {_problem(error)}"


def _problem(error: Exception) -> str:
    """In one line, without the picture that the library draws."""
    return " ".join(str((isinstance(error, yaml.MarkedYAMLError) and error.problem) or error).split())

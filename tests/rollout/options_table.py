"""The README's table of options, made from the worker's config: `python -m tests.rollout.options_table` rewrites it."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import PydanticUndefined

from rollout.command.config import WorkerConfig

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- options:begin -->", "<!-- options:end -->"


def table() -> str:
    lines = ["| option | default | unit | what |", "|---|---|---|---|"]
    group = ""
    for name, field in WorkerConfig.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        if extra["group"] != group:
            group = str(extra["group"])
            lines.append(f"| **{group}** | | | |")
        default = "required" if field.default is PydanticUndefined else _shown(field.default)
        lines.append(f"| `--{name.replace('_', '-')}` | {default} | {extra['unit']} | {field.description} |")
    return "\n".join(lines)


def _shown(default: object) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`"


def parts() -> tuple[str, str, str]:
    """The README before, in and after the table."""
    before, rest = README.read_text().split(BEGIN)
    middle, after = rest.split(END)
    return before, middle.strip(), after


if __name__ == "__main__":
    before, _, after = parts()
    README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}")

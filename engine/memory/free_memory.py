"""How much memory this process may still take on the host: arithmetic over what the kernel says, without torch."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")


def host_bytes(root: Path = ROOT) -> int:
    """Available memory of the machine, or of the container if that has less; 0 where the kernel does not say.

    Page cache counts as available, since it gives way. root: where /proc and /sys are looked for.
    """
    machine = _table(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    limits = [_left(folder) for folder in _groups(root)]
    return max(0, min([machine, *(left for left in limits if left is not None)]))


def _groups(root: Path) -> list[Path]:
    """Folders of the control groups (version 2, then 1) that hold this process, outermost last."""
    folders = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            # In a container the path may be that of the host, which is not to be seen from inside.
            inner = top / path.strip("/")
            folders += [inner, *(parent for parent in inner.parents if parent.is_relative_to(top))]
    return folders


def _left(folder: Path) -> int | None:
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, now = _text(folder / limit).strip(), _text(folder / used).strip()
        if most.isdigit() and now.isdigit():
            return int(most) - int(now) + _table(folder / "memory.stat").get(cache, 0)
    return None


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

"""What is left of the host's memory, from what the kernel writes about it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.memory.free_memory import host_bytes

MEMINFO = "MemTotal:       16000 kB\nMemFree:          100 kB\nMemAvailable:    8000 kB\n"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path


def group(root: Path, path: str, **files: str) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)


def test_without_a_limit_it_is_what_the_machine_has_page_cache_included(machine: Path) -> None:
    assert host_bytes(machine) == 8000 * 1024


def test_a_limit_of_the_container_counts_and_its_page_cache_gives_way(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/\n")
    group(machine, "", max="5000000\n", current="3000000\n", stat="anon 1\ninactive_file 700000\n")
    assert host_bytes(machine) == 2_700_000


def test_a_limit_further_out_counts_too(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/system.slice/worker.service\n")
    group(machine, "system.slice/worker.service", max="max\n", current="1\n")
    group(machine, "system.slice", max="1000000\n", current="400000\n", stat="")
    assert host_bytes(machine) == 600_000


def test_a_path_that_is_seen_from_outside_only_ends_at_the_top(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/docker/abc\n")
    group(machine, "", max="900000\n", current="0\n")
    assert host_bytes(machine) == 900_000


def test_control_groups_of_version_1(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("5:cpu:/a\n4:memory:/b\n")
    group(
        machine,
        "memory/b",
        limit_in_bytes="2000000\n",
        usage_in_bytes="1500000\n",
        stat="inactive_file 1\ntotal_inactive_file 100000\n",
    )
    assert host_bytes(machine) == 600_000


def test_a_limit_above_the_machine_is_none_and_a_limit_passed_leaves_nothing(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/\n")
    group(machine, "", max=str(2**60), current="0\n")
    assert host_bytes(machine) == 8000 * 1024
    group(machine, "", max="100\n", current="200\n")
    assert host_bytes(machine) == 0


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert host_bytes(tmp_path) == 0


def test_on_this_machine() -> None:
    assert 0 < host_bytes() <= psutil.virtual_memory().total

"""A file that changes while it is read. (What a file can hold wrongly is in test_checkpoint.py.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import WeightsIncomplete
from engine.weights.safetensors_file import SafetensorsFile


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"b": torch.arange(8.0), "a": torch.arange(4)}, path)
    return path


def test_entries_are_in_file_order_and_hold_their_bytes(file: Path) -> None:
    with SafetensorsFile(file) as source:
        assert [(e.name, e.dtype, e.shape, e.nbytes) for e in source.entries] == [
            ("a", "I64", (4,), 32),
            ("b", "F32", (8,), 32),
        ]
        raw = [bytearray(entry.nbytes) for entry in source.entries]
        for entry, target in zip(source.entries, raw, strict=True):
            source.read_at(entry.start, memoryview(target))
        source.check_unchanged()
    assert torch.frombuffer(raw[0], dtype=torch.int64).tolist() == [0, 1, 2, 3]
    assert torch.frombuffer(raw[1], dtype=torch.float32).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_file_cut_after_it_was_opened(file: Path) -> None:
    with SafetensorsFile(file) as source:
        first, last = source.entries
        os.truncate(file, file.stat().st_size - 1)
        source.read_at(first.start, memoryview(bytearray(32)))
        with pytest.raises(WeightsIncomplete, match="cut short"):
            source.read_at(last.start, memoryview(bytearray(32)))


def test_a_file_written_to_after_it_was_opened(file: Path) -> None:
    with SafetensorsFile(file) as source:
        source.check_unchanged()
        os.utime(file, ns=(0, 0))
        with pytest.raises(WeightsIncomplete, match="written to"):
            source.check_unchanged()


def test_a_file_that_another_has_taken_the_place_of(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    with SafetensorsFile(file) as source:
        other.replace(file)
        with pytest.raises(WeightsIncomplete, match="was replaced") as caught:
            source.check_unchanged()
        assert caught.value.field == file.name
        file.unlink()
        with pytest.raises(WeightsIncomplete, match="went away while it was read: No such file"):
            source.check_unchanged()


def test_a_link_that_moves_on_to_the_next_step(file: Path, tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "latest").symlink_to(file.parent)
    with SafetensorsFile(tmp_path / "latest" / file.name) as source:
        source.check_unchanged()
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").symlink_to(tmp_path / "next")
        with pytest.raises(WeightsIncomplete, match="was replaced"):
            source.check_unchanged()


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(WeightsIncomplete, match="cannot be opened"):
        SafetensorsFile(tmp_path / "a\0b")


def test_the_file_is_closed_whatever_happens(file: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError), SafetensorsFile(file):
        raise RuntimeError
    file.write_bytes(b"")
    with pytest.raises(WeightsIncomplete):
        SafetensorsFile(file)
    assert set(os.listdir("/proc/self/fd")) == before

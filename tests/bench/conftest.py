from __future__ import annotations

from pathlib import Path

import pytest

from bench.make_model import make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny shape."""
    path = tmp_path_factory.mktemp("tiny")
    make_model("tiny", path)
    return path

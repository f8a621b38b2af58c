"""What a process for foreign code may say: plain values, and nothing that runs here."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from rollout.environments.base import Rewards, Step
from rollout.environments.frames import NotPlain, bounded_pickle, plain


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        2.5,
        "text",
        b"bytes",
        [1, (2, {"a": {3}})],
        1j,
        frozenset({4}),
        Rewards(1.0, {"a": 1.0}),
        Step(done=True),
    ],
)
def test_plain_values_cross(value: Any) -> None:
    assert plain(bounded_pickle(value)) == value


def test_arrays_cross() -> None:
    for array in (np.arange(5, dtype=np.int32), np.zeros((0, 2)), np.asfortranarray(np.ones((3, 2))), np.float32(2)):
        np.testing.assert_array_equal(plain(bounded_pickle(array)), array)


def called(module: str, name: str, *args: str) -> bytes:
    """A pickle that is what the call returns, as somebody would write it who means harm."""

    def text(value: str) -> bytes:
        return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()

    function = text(module) + text(name) + pickle.STACK_GLOBAL
    return b"\x80\x04" + function + pickle.MARK + b"".join(map(text, args)) + pickle.TUPLE + pickle.REDUCE + pickle.STOP


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("os", "getcwd", ()),
        ("rollout.environments.pool", "os.getcwd", ()),
        ("rollout.environments.processes", "os", ()),
        ("rollout.environments.frames", "bounded_pickle", ("x",)),
        ("rollout.environments.pool", "Pool", ()),
        ("rollout.__main__", "main", ()),
        ("rollout.environments.base", "Step.__init__", ()),
        ("rollout.environments.isolated", "Step", ()),
        ("rollout.environments.nothing", "Step", ()),
    ],
)
def test_nothing_of_ours_is_called(module: str, name: str, args: tuple[str, ...]) -> None:
    with pytest.raises(NotPlain, match=name):
        plain(called(module, name, *args))

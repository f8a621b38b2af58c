"""docs/client.md: its examples run, and it names every error and every option of sampling."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zmq.auth import create_certificates

from protocols.errors import ERRORS, NumericalError
from rollout.client.groups import Law
from rollout.local import local_worker
from tests.rollout.workers import worker

TEXT = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def scope(address: str) -> dict[str, Any]:
    learned: list[tuple[Any, ...]] = []
    return {
        "ADDRESS": address,
        "STEPS": 2,
        "learned": learned,
        "learn": lambda *arrays: learned.append(arrays),
        "save_weights": lambda step: f"/weights/{step}",
        "tasks": lambda _: [([1, 2], [3]), ([4, 5, 6], [7])],
        "reward": lambda t: float(t.metadata["task"]),
        "observe": lambda ids: np.asarray(ids)[:1],
    }


def check(learned: list[tuple[Any, ...]], count: int) -> None:
    assert len(learned) == count
    for prompt, ids, mask, logprobs, _ in learned:
        assert len(prompt) > 0
        assert len(ids) == len(mask) == len(logprobs) > 0


def test_a_first_trajectory_then_the_same_with_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny, clients = tmp_path / "tiny", tmp_path / "clients"
    exec(BLOCKS[0].replace('"tiny"', repr(str(tiny))), {})
    with local_worker(tiny) as served:
        exec(BLOCKS[1].replace("tcp://127.0.0.1:5555", served.address), {})
    assert capsys.readouterr().out.count("truncated, length, 21 tokens, 2 turn(s)") == 2

    clients.mkdir()
    _, worker_secret = create_certificates(tmp_path, "worker")
    public, _ = create_certificates(tmp_path, "trainer")
    Path(public).rename(clients / "trainer.key")
    with local_worker(tiny, curve_secret=Path(worker_secret), curve_clients=clients) as served:
        code = re.sub(r'load_certificate\("', f'load_certificate("{tmp_path}/', BLOCKS[3])
        exec(code, {"ADDRESS": served.address})
    assert capsys.readouterr().out == "ready\n"


def test_the_trainer() -> None:
    with worker() as served:
        names = scope(served.address)
        exec(BLOCKS[2], names)
    check(names["learned"], 2 * 2 * 8)
    assert len(BLOCKS[2].splitlines()) <= 22


def test_the_asyncio_version() -> None:
    with worker() as served:
        names = scope(served.address)
        exec(BLOCKS[4], names)
        asyncio.run(names["main"]())
    check(names["learned"], 4)


def test_the_remote_environment() -> None:
    with worker() as served:
        names = scope(served.address)
        exec(BLOCKS[5], names)
    check(names["learned"], 4)
    assert [entry[-1] for entry in names["learned"]] == [1.0] * 4


def test_groups_and_tails() -> None:
    with worker() as served:
        names = scope(served.address)
        exec(BLOCKS[6], names)
    assert len(names["learned"]) >= 2


def test_every_error_is_in_the_table() -> None:
    for error in ERRORS.values():
        if error is not NumericalError:  # only in records
            assert f"`{error.__name__}`" in TEXT, error


def test_every_option_of_sampling_is_named() -> None:
    sentence = TEXT[TEXT.index("How tokens are sampled") : TEXT.index("An entry of `script`")]
    assert set(re.findall(r"`([a-z_]+)`", sentence)) == Law.__annotations__.keys() | {"group"}

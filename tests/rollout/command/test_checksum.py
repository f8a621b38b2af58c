"""`rollout-worker checksum`: the same digest as an update's, and checksums that an update takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import WeightsInvalid
from engine.start.build import load_engine
from rollout.command import checksum
from tests.rigs import RandModel, write_rand

CONFIG = EngineConfig(max_running=2, max_step_tokens=32, max_context=64)


@pytest.mark.parametrize("model", [RandModel(), RandModel(tied=True, dtype=torch.bfloat16)])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_digest_is_that_of_a_worker_that_serves_it(model: RandModel, shards: int, tmp_path: Path) -> None:
    path = write_rand(tmp_path / "m", model, shards=shards)
    for dtype in ("float32", "bfloat16"):
        assert checksum.digest(path, dtype) == load_engine(path, CONFIG, dtype=dtype).weights.digest


def test_the_checksums_are_taken_by_an_update_and_miss_no_change(tmp_path: Path) -> None:
    path = write_rand(tmp_path / "m", shards=2, generation_config={"eos_token_id": 3})
    sums = checksum.file_checksums(path)
    assert sums.keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    weights = load_engine(path, CONFIG).weights
    weights.prepare(str(path), 1, sums)
    (path / "generation_config.json").write_text('{"eos_token_id": 4}')
    with pytest.raises(WeightsInvalid, match=r"generation_config\.json"):
        weights.prepare(str(path), 1, sums)


def test_the_command_prints_both_dtypes_and_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rand(tmp_path / "m")
    assert checksum.main([str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["digest", "float32", checksum.digest(path, "float32")]
    assert rows[1] == ["digest", "bfloat16", checksum.digest(path, "bfloat16")]
    assert {(kind, name): text for kind, name, text in rows[2:]} == {
        ("file", name): text for name, text in checksum.file_checksums(path).items()
    }
    assert checksum.main([str(path), "--json", "--dtype", "bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "digest": {"bfloat16": rows[1][2]},
        "checksums": checksum.file_checksums(path),
    }


def test_a_checkpoint_that_a_worker_would_refuse_is_refused_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rand(tmp_path / "m")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    for given, message in ((path, "model.safetensors"), (tmp_path / "none", "there is no such directory")):
        assert checksum.main([str(given)]) == 1
        captured = capsys.readouterr()
        assert message in captured.err
        assert not captured.out
    with pytest.raises(SystemExit) as caught:
        checksum.main([str(path), "--dtype", "float16"])
    assert caught.value.code == 2

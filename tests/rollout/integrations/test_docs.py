"""docs/trainers.md: its code runs, and its training step trains."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import examples
from protocols.fields import Record
from rollout.client import RolloutClient
from rollout.local import local_worker
from tests.rollout.integrations.trl.environments import Sometimes
from tests.rollout.integrations.trl.stubs import ByteTokenizer, arguments, trainer
from tests.rollout.workers import served, worker

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "trainers.md").read_text()
GRPO, ASYNC, STEP, LOCAL, *SIX = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
ENV = f"guess={Sometimes.__module__}:{Sometimes.__name__}"


class FakeTRL:
    """Stands where TRL's trainers do, and calls the seams in TRL's order; the examples run the real ones."""

    def __init__(self) -> None:
        self.rewards: list[Any] = []
        self.samples: list[Any] = []

    def grpo(self, model: Any, **given: Any) -> Any:
        made = trainer()
        made.model, made.args = model, arguments(**vars(given["args"]))

        def train() -> None:
            made.vllm_generation.sync_weights()
            found = given["rollout_func"]([row["prompt"] for row in given["train_dataset"]], made)
            self.rewards += given["reward_funcs"](completions=[], trainer_state=None, **found)

        made.train = train
        return made

    def async_grpo(self, path: str, **given: Any) -> Any:  # noqa: ARG002
        rollouts, weights = given["rollout_worker"], given["weight_transfer"]

        def train() -> None:
            weights.init_weight_transfer()
            weights.send_weights(iter([("model.norm.weight", torch.ones(4))]))
            rollouts.update_model_version(1)
            rollouts.start()
            self.samples += [rollouts.rollout_buffer.get(timeout=10) for _ in range(4)]
            rollouts.stop()
            weights.destroy()

        return types.SimpleNamespace(train=train)


def config(**options: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**options)


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> FakeTRL:
    fake = FakeTRL()
    seams: dict[str, dict[str, Any]] = {
        "trl": {"GRPOConfig": config, "GRPOTrainer": fake.grpo},
        "trl.experimental": {},
        "trl.experimental.async_grpo": {
            "AsyncGRPOConfig": lambda **options: arguments(**options),
            "AsyncGRPOTrainer": fake.async_grpo,
        },
    }
    for name, content in seams.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return fake


@pytest.fixture
def address() -> Iterator[str]:
    with worker(what=served(env=(ENV,))) as thread:
        yield thread.address


def names(address: str) -> dict[str, Any]:
    return {
        "ADDRESS": address,
        "PATH": "/checkpoint",
        "model": trainer().model,
        "tokenizer": ByteTokenizer(),
        "dataset": [{"prompt": "abc"}, {"prompt": "abc"}],
        "HIDDEN": {"abc": 5},
    }


def test_the_grpo_trainer(trl: FakeTRL, address: str) -> None:
    exec(GRPO, names(address))
    assert trl.rewards == [0.5, None]


def test_the_async_trainer(trl: FakeTRL, address: str) -> None:
    exec(ASYNC, names(address))
    assert [(s.metrics["reward"], s.model_version) for s in trl.samples] == [(0.5, 1)] * 4


def test_the_options_that_the_page_names_are_trls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    grpo = pytest.importorskip("trl.trainer.grpo_config").GRPOConfig
    background = pytest.importorskip("trl.experimental.async_grpo.async_grpo_config").AsyncGRPOConfig
    options = set(re.findall(r"(\w+)=", re.search(r"GRPOConfig\((.*?)\)", GRPO)[1]))  # type: ignore[index]
    assert options | {"generation_kwargs", "temperature", "top_k", "chat_template_kwargs"} <= set(
        grpo.__dataclass_fields__
    )
    options = set(re.findall(r"(\w+)=", re.search(r"AsyncGRPOConfig\((.*?)\)", ASYNC)[1]))  # type: ignore[index]
    assert options | {"max_inflight_tasks", "queue_maxsize", "num_generations"} <= set(background.__dataclass_fields__)


def test_the_six_things(address: str, tmp_path: Path) -> None:
    kept: list[Record] = []
    with RolloutClient(address, timeout=10.0) as client:
        scope = {
            "client": client,
            "prompt_ids": [1, 2, 3],
            "version": 0,
            "keep": kept.append,
            "model": trainer().model,
            "SHARED": tmp_path,
        }
        seen: list[Any] = []
        for block in SIX:
            exec(block, scope)
            seen.append(dict(scope))
        modes, rows, ages, _, pushed, errors = seen
        assert list(modes["t"].segment.more_logprobs) == ["processed"]
        assert modes["t"].sampling.seed is not None
        ((ids, mask, logprobs),) = rows["rows"]
        assert len(ids) == len(mask) == len(logprobs) == 3 + 8
        assert ages["age"] == 0
        assert len(kept) == 2
        assert client.status().results_unacknowledged == 0
        assert pushed["update"].version == client.status().weight_version == 1
        assert errors["lost"] == []


def test_the_step_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewarding one token makes it likelier; the first ratio is 1, and so is every later one: all is on policy."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 16}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = Qwen3ForCausalLM(
        Qwen3Config(**shape, **heads, eos_token_id=None, bos_token_id=None, max_position_embeddings=128)
    )
    rewards: list[float] = []

    def reward(t: Any) -> float:
        ids = torch.tensor(t.token_ids, dtype=torch.int64)
        with torch.no_grad():
            table = (model(input_ids=ids[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        found = table.gather(1, ids[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found[t.loss_mask[1:] == 1], t.response_logprobs, atol=1e-4)
        rewards.append(float((t.response_ids == 7).mean()))
        return rewards[-1]

    model.save_pretrained(tmp_path / "start")
    scope: dict[str, Any] = {"reward": reward, "model": model, "PATH": tmp_path / "start"}
    exec(LOCAL, scope)
    assert capsys.readouterr().out.splitlines()[-1] == "1"
    exec(STEP, scope)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    with (
        local_worker(tmp_path / "start", log_level="warning", environment={"OMP_NUM_THREADS": "1"}) as served,
        RolloutClient(served.address, timeout=60.0) as client,
    ):
        client.push_weights(model, 0)
        for version in range(6):
            scope["train_step"](client, model, optimizer, [[1, 2, 3], [4, 5]], version)
        assert client.status().weight_version == 6
    assert np.mean(rewards[-16:]) > np.mean(rewards[:16]) + 0.1


def test_the_examples_named_exist() -> None:
    for name in re.findall(r"-m examples\.(\w+)", TEXT):
        assert (Path(examples.__file__).parent / f"{name}.py").is_file()

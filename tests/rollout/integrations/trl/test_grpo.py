"""`GRPORollouts` between a trainer's seams and a worker with an engine made of a formula."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.client import RolloutClient
from rollout.integrations.trl import GRPORollouts
from tests.rollout.integrations.trl.stubs import trainer
from tests.rollout.timed_engine import TimedEngine, reply_ids, reply_logprobs
from tests.rollout.workers import WorkerThread, served, worker

ENV = "sometimes=tests.rollout.integrations.trl.environments:Sometimes"


@pytest.fixture
def running() -> Iterator[WorkerThread]:
    with worker(TimedEngine(), what=served(env=(ENV,))) as thread:
        yield thread


@pytest.fixture
def client(running: WorkerThread) -> Iterator[RolloutClient]:
    with RolloutClient(running.address, timeout=10.0) as client:
        yield client


def attached(client: RolloutClient, **options: Any) -> tuple[GRPORollouts, SimpleNamespace]:
    rollouts, made = GRPORollouts(client, **options), trainer()
    rollouts.attach(made)
    rollouts.sync_weights()
    return rollouts, made


def test_one_completion_for_each_prompt_in_order_and_equal_neighbours_are_a_group(client: RolloutClient) -> None:
    rollouts, made = attached(client)
    message = [{"role": "user", "content": "hello"}]
    found = rollouts([message, message, "abc", "abc", "abc", message], made)
    prompts = [b"uhelloa", b"uhelloa", b"abc", b"abc", b"abc", b"uhelloa"]
    assert found["prompt_ids"] == [list(prompt) for prompt in prompts]
    for prompt, ids, logprobs in zip(prompts, found["completion_ids"], found["logprobs"], strict=True):
        assert ids == reply_ids(len(prompt), 4).tolist()
        assert logprobs == reply_logprobs(4).tolist()
    assert found["env_mask"] == [[1] * 4] * 6
    assert found["worker_status"] == ["truncated"] * 6  # by max_completion_length
    assert found["worker_turns"] == [1] * 6
    assert found["worker_reward"] == [None] * 6


def test_the_trainer_is_made_to_push_and_to_check(client: RolloutClient, tmp_path: Path) -> None:
    rollouts, made = GRPORollouts(client, directory=tmp_path), trainer()
    client.update_weights("/w/7", 7)  # a worker that has served another run
    with pytest.raises(RuntimeError, match=r"attach\(trainer\)"):
        rollouts(["abc"], made)
    rollouts.attach(made)
    assert (made.use_vllm, made._last_loaded_step) == (True, -1)
    for version in (8, 9):
        made.vllm_generation.sync_weights()
        assert client.status().weight_version == version
        assert len(list(tmp_path.glob("*/*/model.safetensors"))) == 1
    assert made.accelerator.waits == 2


def test_another_process_than_the_first_pushes_nothing_but_waits_for_the_weights(client: RolloutClient) -> None:
    rollouts, made = GRPORollouts(client), trainer()
    made.accelerator.is_main_process = False
    rollouts.attach(made)
    rollouts.sync_weights()
    assert client.status().weight_version == 0
    assert made.accelerator.waits == 1


def test_masks_are_of_what_the_model_said(client: RolloutClient) -> None:
    rollouts, made = attached(client, script=[[7, 8]])
    found = rollouts(["abc"], made)
    assert found["env_mask"] == [[1, 1, 1, 1, 0, 0, 1, 1, 1, 1]]
    assert found["logprobs"][0][4:6] == [0.0, 0.0]
    assert found["worker_turns"] == [2]


def test_what_failed_is_masked_and_told(client: RolloutClient, caplog: pytest.LogCaptureFixture) -> None:
    rollouts, made = attached(client, environment="sometimes")
    found = rollouts(["abc"] * 4, made)
    assert found["worker_status"] == ["completed", "failed"] * 2
    assert found["worker_reward"] == [0.5, None] * 2
    assert found["env_mask"] == [[1] * 4, [0] * 4] * 2
    assert "2 of 4 trajectories" in caplog.text
    assert "odd" in caplog.text


def test_a_completion_without_a_token_has_one_that_is_masked(client: RolloutClient) -> None:
    rollouts, made = attached(client, environment="sometimes", config={"reset": True})
    found = rollouts(["abc"] * 2, made)
    assert found["completion_ids"][1] == [0]
    assert (found["env_mask"][1], found["logprobs"][1]) == ([0], [0.0])


def test_a_step_in_which_all_failed_is_an_error(client: RolloutClient) -> None:
    rollouts, made = attached(client, environment="sometimes", config={"always": True})
    with pytest.raises(RuntimeError, match=r"none of 4 trajectories.*odd"):
        rollouts(["abc"] * 4, made)


def test_evaluation_is_kept_apart_and_options_win(client: RolloutClient, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, made = attached(client, max_tokens=2, metadata={"run": 3})
    submitted: list[Any] = []
    submit = client.submit

    def note(groups: Any, **options: Any) -> Any:
        submitted.append((groups, options))
        return submit(groups, **options)

    monkeypatch.setattr(client, "submit", note)
    made.model.eval()
    made.state.global_step = 12
    assert [len(ids) for ids in rollouts(["abc"], made)["completion_ids"]] == [2]
    ((group,), options) = submitted[0]
    assert (group.purpose, group.metadata, group.min_version) == ("eval", {"run": 3}, 1)
    assert options["step"] == 12


def test_an_option_may_be_a_function_of_the_prompt(client: RolloutClient) -> None:
    rollouts, made = attached(client, environment="sometimes", config=lambda prompt: {"always": prompt == "bad"})
    assert rollouts(["abc", "bad"], made)["worker_status"] == ["completed", "failed"]


def test_filters_are_told_once(client: RolloutClient, caplog: pytest.LogCaptureFixture) -> None:
    rollouts, made = attached(client, top_k=5)
    rollouts(["abc"], made)
    rollouts(["abc"], made)
    assert caplog.text.count("top_k") == 1


def test_another_dtype_is_told(client: RolloutClient, caplog: pytest.LogCaptureFixture) -> None:
    made = trainer()
    made.model.dtype = "torch.bfloat16"
    GRPORollouts(client).attach(made)
    assert "float32" in caplog.text
    assert "bfloat16" in caplog.text

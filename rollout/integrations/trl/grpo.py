"""`trl.GRPOTrainer(rollout_func=...)`: its completions come from a worker, which gets its weights before each step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from rollout.client import RolloutClient, Trajectory
from rollout.client.weights import Mode, OnTimeout
from rollout.integrations.trl.law import encode_prompt, law, options_of, warn_of_filters

log = logging.getLogger(__name__)


class GRPORollouts:
    """A `rollout_func` for `trl.GRPOTrainer`; `attach` it when the trainer is made.

    encode: from a prompt of the dataset to token ids; without it the trainer's tokenizer and chat template do it.
    directory, mode, drain_timeout, on_timeout: of `RolloutClient.push_weights`. options: more arguments of
    `RolloutClient.group` (`environment=`, `config=`, `script=`, `max_total_tokens=`, ...); they win over what the
    trainer's arguments say. One that is a function is called with each prompt: TRL hands over no other column.

    What it returns to TRL: `env_mask`, 1 on what is trained on; and to its reward functions, one entry a completion,
    `worker_status`, `worker_reward` (the environment's; None without one) and `worker_turns`. A completion that
    failed or was aborted has a mask of 0 throughout; its reward function should return None where `worker_status`
    is neither "completed" nor "truncated", so that TRL leaves it out of the group's mean.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        encode: Callable[[Any], Sequence[int]] | None = None,
        directory: str | os.PathLike[str] | None = None,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: OnTimeout = "abort",
        **options: Any,
    ) -> None:
        self._client = client
        self._encode = encode
        self._push = partial(
            client.push_weights, directory=directory, mode=mode, drain_timeout=drain_timeout, on_timeout=on_timeout
        )
        self._options = options
        self._trainer: Any = None
        self._version = 0
        self._warned = False

    def attach(self, trainer: Any) -> None:
        """Make the trainer push its weights before each step's rollouts, and compare the worker's logprobs with its
        own (`sampling/sampling_logp_difference` in its log). Raises the client's errors when no worker answers.

        TRL does both for its vLLM backend alone, by these three names, and otherwise ignores returned logprobs. They
        are set after its constructor, which would look for vLLM.
        """
        welcome = self._client.connect()
        trained = str(trainer.model.dtype).removeprefix("torch.")
        if welcome.model.dtype != trained:
            log.warning(
                "the worker serves %s, the trainer trains %s: logprobs will differ", welcome.model.dtype, trained
            )
        self._trainer = trainer
        self._version = self._client.ping().weight_version  # of now; the welcome's is that of then
        trainer.use_vllm = True
        trainer.vllm_generation = self
        trainer._last_loaded_step = -1

    def sync_weights(self) -> None:
        """Called by TRL on every process before the rollouts of a new step."""
        accelerator = self._trainer.accelerator
        self._version += 1
        weights = accelerator.get_state_dict(self._trainer.model)
        if accelerator.is_main_process:
            self._push(weights, self._version)
        accelerator.wait_for_everyone()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """One completion for each entry of `prompts`, in order: TRL has repeated each as often as it wants samples.

        Raises RuntimeError before `attach`, or when all failed; and the client's errors.
        """
        if trainer is not self._trainer:
            raise RuntimeError("call attach(trainer) after the trainer is made: the worker would keep its old weights")
        tokenizer = trainer.processing_class
        template = trainer.args.chat_template_kwargs or {}
        arguments = {
            **law(trainer.args),
            "min_version": self._version,
            "purpose": "train" if trainer.model.training else "eval",
        }
        groups = []
        for prompt, same in groupby(prompts):
            ids = self._encode(prompt) if self._encode else encode_prompt(tokenizer, prompt, **template)
            options = options_of(self._options, prompt)
            groups.append(self._client.group(ids, len(list(same)), **(arguments | options)))
        if not self._warned:
            self._warned = True
            warn_of_filters(groups[0].sampling)
        trajectories = self._client.submit(groups, step=trainer.state.global_step).results()
        failed = [trajectory for trajectory in trajectories if not trajectory.ok]
        if failed:
            first = f"{failed[0].trajectory_id}: {failed[0].finish_reason} {failed[0].error or ''}"
            if len(failed) == len(trajectories):
                raise RuntimeError(f"none of {len(failed)} trajectories came to its end; the first, {first}")
            log.warning("%d of %d trajectories did not come to their end; %s", len(failed), len(trajectories), first)
        return _as_trl_wants(trajectories, filler=tokenizer.eos_token_id)


def _as_trl_wants(trajectories: Sequence[Trajectory], filler: int) -> dict[str, Any]:
    """Lists with one entry a trajectory. filler: stands, masked, for a completion without any token."""
    empty = [len(trajectory.response_ids) == 0 for trajectory in trajectories]
    return {
        "prompt_ids": [t.prompt_ids.tolist() for t in trajectories],
        "completion_ids": [
            [filler] if e else t.response_ids.tolist() for t, e in zip(trajectories, empty, strict=True)
        ],
        "logprobs": [[0.0] if e else t.response_logprobs.tolist() for t, e in zip(trajectories, empty, strict=True)],
        "env_mask": [[0] if e else _mask(t) for t, e in zip(trajectories, empty, strict=True)],
        "worker_status": [t.status for t in trajectories],
        "worker_reward": [t.reward for t in trajectories],
        "worker_turns": [len(t.turns) for t in trajectories],
    }


def _mask(trajectory: Trajectory) -> list[int]:
    mask: list[int] = trajectory.response_mask.tolist()
    return mask if trajectory.ok else [0] * len(mask)

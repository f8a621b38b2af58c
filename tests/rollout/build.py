"""What the trajectory tests are made of: a model, groups, specs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from protocols.fields import Budget, Environment, Group, ModelInfo, Sampling, ScriptedTurn
from rollout.trajectory.spec import TrajectorySpec

EOS = 2
MODEL = ModelInfo(architecture="Qwen3ForCausalLM", dtype="float32", vocab_size=512, max_context=64, eos_ids=(EOS,))


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def group(
    *,
    prompt: tuple[int, ...] = (10, 11, 12),
    sampling: dict[str, Any] | None = None,
    budget: dict[str, Any] | None = None,
    environment: Environment | None = None,
    **changes: Any,
) -> Group:
    return Group(
        id="g",
        prompt=ids(*prompt),
        trajectory_ids=("t",),
        sampling=Sampling(**{"max_tokens": 8, **(sampling or {})}),
        budget=Budget(**(budget or {})),
        environment=environment or Environment(),
        **changes,
    )


def spec(group: Group, **changes: Any) -> TrajectorySpec:
    defaults = {"session": "s", "batch_id": "b", "trajectory_id": "t", "sample_index": 1, "seed": 7, "order": 5}
    return TrajectorySpec(group=group, **{**defaults, **changes})


def script(*observations: tuple[int, ...], glue: tuple[int, ...] = (90,)) -> Environment:
    turns = (ScriptedTurn(glue=ids(*glue), observation=ids(*observation)) for observation in observations)
    return Environment(script=tuple(turns))


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """On a loop of its own; a hang fails instead of hanging."""
    return asyncio.run(asyncio.wait_for(main, 60))

"""`reasoning-gym`: one question, one answer, scored by the task's own checker.

    --env reasoning=rollout.environments.adapters.reasoning_gym:ReasoningGym

    config = {"task": "leg_counting", "index": 7}
    client.group(messages=messages(config), environment="reasoning", config=config, n=8)

Needs the extra `reasoning-gym`, where the worker runs and where `messages` is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from protocols.fields import Record
from rollout.environments.adapters.config import conversation, index, known, option
from rollout.environments.base import Context, Environment, Rewards, Step, TurnResult
from rollout.tools.parse import read

SPLITS = {"train": 0, "test": 10**9}
"""What is added to the seed: item i of a dataset is made from seed + i, so that these never meet."""
OPTIONS = ("task", "split", "seed", "index", "params", "system")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
SYSTEM = "Think as long as you need. Then give the final answer, and nothing else, between <answer> and </answer>."


def messages(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """The system message and the question. Raises ValueError for a config that means nothing."""
    _, entry = load(config)
    system = option(config, "system", SYSTEM)
    said = [{"role": "system", "content": system}] if system else []
    return [*said, {"role": "user", "content": entry["question"]}]


def load(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset and the entry. config: task (name of a dataset), split ("train" or "test"), seed, index, params
    (arguments of the dataset: its difficulty), system. The same for the same config."""
    import reasoning_gym

    known(config, OPTIONS)
    at, split = index(config), option(config, "split", "train")
    if split not in SPLITS:
        raise ValueError(f"config.split must be train or test, not {split!r}")
    task = option(config, "task", "")
    try:
        dataset = reasoning_gym.create_dataset(
            task, seed=option(config, "seed", 0) + SPLITS[split], size=at + 1, **option(config, "params", {})
        )
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"config.task {task!r} with these params: {error}") from error
    return dataset, dataset[at]


class ReasoningGym(Environment):
    """Reward: the score in [0, 1] of what stands between the last `<answer>` tags, or of the whole answer. A part
    `accuracy` says the same; `format` is 1 where the tags are there, and is no part of the reward."""

    isolation: ClassVar = "process"
    stateless: ClassVar = True

    def reset(self, context: Context) -> None:
        self._chat = conversation(context)
        self._dataset, self._entry = load(context.config)
        self._answer: str | None = None
        self._tagged = False

    def step(self, turn: TurnResult) -> Step:
        said = read(self._chat.text(turn), thinking=self._chat.form.opens_reasoning()).content
        found = ANSWER.findall(said)
        self._tagged = bool(found)
        self._answer = (found[-1] if found else said).strip()
        return Step(done=True)

    def finish(self, record: Record) -> Rewards:  # noqa: ARG002
        """A turn that was cut gave no answer: 0."""
        score = 0.0 if self._answer is None else float(self._dataset.score_answer(self._answer, self._entry))
        return Rewards(score, {"accuracy": score, "format": float(self._tagged)})

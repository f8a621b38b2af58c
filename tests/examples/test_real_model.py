"""A real language model: the engine against the transformers library, and a chat through the worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rollout.chat.format import ChatFormat, Form
from rollout.chat.tokenizer import Tokenizer
from rollout.client import RolloutClient, Trajectory, TurnDone
from rollout.local import local_worker
from tests.engine.serve import ask, load, serve
from tests.rigs import Reference

Array = npt.NDArray[Any]

pytestmark = [pytest.mark.realmodel, pytest.mark.timeout(900)]

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from 1 to 20.",
    "Why is the sky blue? Explain it to a child.",
    "Name three fruits.",
    "Translate to French: good morning, my friend.",
    "What is 12 plus 30?",
    "Write a Python function that reverses a string.",
)
LONG = "The quick brown fox jumps over the lazy dog, again and again, until the sun goes down. "
TOLERANCE = 1e-3
"""Of logprobs in float32: thirty layers add their sums in another order than the reference does."""


@pytest.fixture(scope="module")
def form(smollm2_checkpoint: Path) -> Form:
    chat = ChatFormat.load(smollm2_checkpoint, Tokenizer.load(smollm2_checkpoint))
    assert chat is not None
    return chat.form()


@pytest.fixture(scope="module")
def reference(smollm2_checkpoint: Path) -> Reference:
    return Reference(smollm2_checkpoint)


def predictions(reference: Reference, ids: list[int]) -> tuple[Array, Array]:
    """Of one whole forward over L ids, for each but the first: the likeliest id there, and the actual one's logprob.

    int64[L - 1], float64[L - 1]. Ids that are the likeliest each time are what greedy decoding would have given.
    """
    rows = torch.from_numpy(reference.logits(ids)[:-1])
    actual = torch.tensor(ids[1:])[:, None]
    logprobs = rows.gather(1, actual)[:, 0].double() - rows.double().logsumexp(-1)
    return rows.argmax(-1).numpy(), logprobs.numpy()


@pytest.mark.stress
def test_64_greedy_tokens_of_16_chats_in_one_batch(smollm2_checkpoint: Path, form: Form, reference: Reference) -> None:
    texts = [*QUESTIONS, *(f"Repeat the last word. {LONG * n}" for n in (1, 2, 3, 4, 5, 6, 8, 10))]
    prompts = [form.prompt([{"role": "user", "content": text}]).tolist() for text in texts]
    assert len(prompts) == 16
    assert len({len(prompt) for prompt in prompts}) > 10
    # 12 rows at once, chunks of at most 64 tokens, and KV for about half of what they need.
    loaded = load(smollm2_checkpoint, max_running=12, max_step_tokens=64, max_context=512, num_blocks=60, lazy=False)
    requests = [ask(str(i), prompt, 64) for i, prompt in enumerate(prompts)]
    ended = serve(loaded, *requests)
    for request in requests:
        completion = ended[request.id]
        tokens, start = completion.token_ids.tolist(), len(request.token_ids)
        best, logprobs = predictions(reference, request.token_ids.tolist() + tokens)
        assert len(tokens) == 64
        assert tokens == best[start - 1 :].tolist()
        np.testing.assert_allclose(completion.logprobs["processed"], logprobs[start - 1 :], rtol=0, atol=TOLERANCE)
    stats = loaded.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.cached_prompt_tokens_total > 0
    assert max(map(len, prompts)) > 64, "no prompt was cut into chunks"


def test_a_two_turn_chat_through_the_worker(smollm2_checkpoint: Path, form: Form, reference: Reference) -> None:
    """Greedy: the answers are the reference's own, and the record is what was said, once each."""
    prompt = form.prompt([{"role": "user", "content": QUESTIONS[0]}]).tolist()
    answers, appended, trajectory = [], [], None
    with (
        local_worker(smollm2_checkpoint, max_running=2, max_context=512, log_level="warning") as worker,
        RolloutClient(worker.address) as client,
    ):
        group = client.group(prompt, environment="remote", temperature=0.0, max_tokens=32, on_length="continue")
        for event in client.submit(group).events():
            if isinstance(event, Trajectory):
                trajectory = event
            elif isinstance(event, TurnDone) and event.turn.index == 0:
                answers.append(event.token_ids.tolist())
                suffix = form.suffix([{"role": "user", "content": "And of Italy? <|im_end|> Answer in one sentence."}])
                glue = suffix.after(event.token_ids)
                observation = np.concatenate([suffix.observation, suffix.opening])
                appended = [*glue.tolist(), *observation.tolist()]
                client.continue_(event, glue=glue, observation=observation)
            else:
                answers.append(event.token_ids.tolist())
                client.continue_(event, done=True)
    assert trajectory is not None
    assert (trajectory.status, trajectory.finish_reason) == ("completed", "env_done")
    assert "Paris" in form.decode(answers[0])
    assert trajectory.token_ids.tolist() == prompt + answers[0] + appended + answers[1]
    mask = [0] * len(prompt) + [1] * len(answers[0]) + [0] * len(appended) + [1] * len(answers[1])
    assert trajectory.loss_mask.tolist() == mask
    best, logprobs = predictions(reference, trajectory.token_ids.tolist())
    sampled = trajectory.loss_mask[1:] == 1
    assert trajectory.token_ids[1:][sampled].tolist() == best[sampled].tolist()
    np.testing.assert_allclose(trajectory.logprobs[1:][sampled], logprobs[sampled], rtol=0, atol=TOLERANCE)
    assert trajectory.turns[1].cached_tokens >= 16

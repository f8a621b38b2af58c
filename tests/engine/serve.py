"""A real engine on a checkpoint, and its completions held against the transformers library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.request import Completion, IntArray, Request, SamplingParams
from engine.start.build import LoadedEngine, load_engine
from tests.rigs import Reference

GREEDY = SamplingParams(temperature=0.0)


def load(
    path: Path,
    *,
    num_blocks: int | None = 100,
    lazy: bool = False,
    dtype: str = "float32",
    token_bytes: Sequence[bytes] | None = None,
    **config: Any,
) -> LoadedEngine:
    """An engine whose KV pool is NaN wherever nothing was written yet."""
    options = EngineConfig(**{"max_running": 8, "max_step_tokens": 64, "max_context": 256} | config)
    loaded = load_engine(path, options, num_blocks=num_blocks, lazy=lazy, dtype=dtype, token_bytes=token_bytes)
    loaded.kv.data.fill_(float("nan"))
    return loaded


def ids(seed: int, count: int, vocab: int = 512) -> IntArray:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def ask(name: str, token_ids: Sequence[int] | IntArray, max_tokens: int = 8, **fields: Any) -> Request:
    """A greedy request unless `params` says otherwise."""
    return Request(name, np.array(token_ids, np.int32), max_tokens, **{"params": GREEDY} | fields)


def serve(loaded: LoadedEngine, *requests: Request) -> dict[str, Completion]:
    """Run these requests to their end; afterwards no block is in use."""
    for request in requests:
        loaded.engine.add(request)
    ended: dict[str, Completion] = {}
    for _ in range(10_000):
        if not loaded.engine.has_work:
            break
        ended |= {completion.request_id: completion for completion in loaded.engine.step()}
    assert set(ended) == {request.id for request in requests}
    assert loaded.engine.stats().blocks_used == 0
    return ended


def update(loaded: LoadedEngine, path: Path, version: int) -> None:
    """Prepare and commit."""
    loaded.weights.prepare(str(path), version, None)
    loaded.engine.commit(loaded.weights.commit, version)


def check_greedy(
    completion: Completion, prompt: Sequence[int] | IntArray, reference: Reference, atol: float = 1e-4
) -> None:
    """Each token is the argmax of a full uncached forward over all before it, and its logprob is that forward's."""
    tokens = completion.token_ids.tolist()
    whole = [int(i) for i in prompt] + tokens
    rows = reference.logits(whole)[len(prompt) - 1 : -1]
    assert tokens == rows.argmax(-1).tolist()
    expected = reference.logprobs(whole)[len(prompt) :]
    np.testing.assert_allclose(completion.logprobs["processed"], expected, rtol=0, atol=atol)


def assert_equal(found: Completion, expected: Completion, atol: float = 0.0) -> None:
    """The same ids, and logprobs that differ by at most `atol`."""
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    difference = np.abs(found.logprobs["processed"] - expected.logprobs["processed"])
    assert difference.max(initial=0.0) <= atol

"""The real engine on the CPU, as the field reports use it: a checkpoint in, completions out."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from engine.request import Completion, Request, SamplingParams
from tests.engine.serve import ids, load

MODES = ("processed", "temperature", "raw")


def ask(name: str, prompt: Iterable[int], max_tokens: int = 8, **fields: Any) -> Request:
    """A request; fields that `SamplingParams` has go there."""
    params = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__dataclass_fields__}
    return Request(name, np.array(list(prompt), np.int32), max_tokens, SamplingParams(**params), **fields)


SMOKE = ask("smoke", [1, 2, 3, 4, 5], 4, temperature=0)


class Real:
    """One engine, stepped by the test. options: those of `load`."""

    def __init__(self, path: Path, *, num_blocks: int | None = None, **options: Any) -> None:
        self._path = path
        self.loaded = load(path, num_blocks=num_blocks, **options)
        self.engine = self.loaded.engine
        self.ended: dict[str, Completion] = {}

    def step(self) -> None:
        for completion in self.engine.step():
            assert completion.request_id not in self.ended, "a second end"
            self.ended[completion.request_id] = completion

    def run(self, *requests: Request) -> list[Completion]:
        """The completions of these requests, in their order, once nothing is left to do."""
        for request in requests:
            self.ended.pop(request.id, None)
            self.engine.add(request)
        while self.engine.has_work:
            self.step()
        return [self.ended[request.id] for request in requests]

    def check_idle(self) -> None:
        """No request, no block in use, and the smoke request gives what it gives in a fresh engine, cached or not."""
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        for _ in range(2):
            same(self.run(SMOKE)[0], smoke(self._path))


@cache
def smoke(path: Path) -> Completion:
    """Of a fresh engine over this checkpoint."""
    return Real(path).run(SMOKE)[0]


def whole(completion: Completion, count: int | None = None) -> Completion:
    """The completion, after a look at what every one owes: lengths that agree, finite logprobs, one version each."""
    tokens = completion.token_ids
    assert count is None or len(tokens) == count
    assert completion.error is None
    for logprobs in completion.logprobs.values():
        assert len(logprobs) == len(tokens)
        assert np.isfinite(logprobs).all()
        assert (logprobs <= 1e-6).all()
    assert sum(run for _, run in completion.weight_versions) == len(tokens)
    return completion


def same(found: Completion, expected: Completion, atol: float = 1e-4) -> None:
    """Equal ids, logprobs equal to `atol`, the same end."""
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert (found.finish_reason, found.stop) == (expected.finish_reason, expected.stop)
    for mode, logprobs in expected.logprobs.items():
        np.testing.assert_allclose(found.logprobs[mode], logprobs, atol=atol)


def prompt(seed: int, length: int, vocab: int = 512) -> list[int]:
    return list(map(int, ids(seed, length, vocab)))

"""An engine on a `FakeRunner`, as the tests of the host side use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Completion, Request, SamplingParams
from engine.scheduling.slots import NEVER
from tests.fake_runner import FakeRunner

PIECES = [bytes([i % 256]) for i in range(256)]
"""id -> bytes, for stop strings: ids below 256 are single bytes, the others have none."""


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Host:
    """Runner, engine and clock. `runner` takes the options of `FakeRunner`, `config` those of `EngineConfig`."""

    def __init__(self, *, lazy: bool = False, runner: dict[str, Any] | None = None, **config: Any) -> None:
        self.clock = Clock()
        self.config = EngineConfig(**{"max_running": 8, "max_step_tokens": 48, "max_context": 256} | config)
        self.runner = FakeRunner(lazy=lazy, num_slots=self.config.max_running, **runner or {})
        self.engine = Engine(self.runner, self.config, PIECES, weight_version=1, clock=self.clock)
        self.scheduler = self.engine._scheduler
        self.pool = self.scheduler.pool
        self.runner.watch(self.pool)
        self.ended: dict[str, Completion] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self, times: int = 1) -> list[Completion]:
        ended = []
        for _ in range(times):
            for completion in self.engine.step():
                assert completion.request_id not in self.ended, "a second end"
                self.ended[completion.request_id] = completion
                ended.append(completion)
        return ended

    def run(self, *requests: Request, limit: int = 5000) -> dict[str, Completion]:
        """Step until nothing is left to do; what has ended since the host was made."""
        self.add(*requests)
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, "it does not end"
        return self.ended

    def check_empty(self) -> None:
        """Nothing is live, launched or leaked."""
        self.engine.resume()
        self.engine.release()
        for request in self.engine.live_requests():
            self.engine.abort(request.id, "abort_client")
        self.run()
        assert self.pool.num_used == 0, "KV blocks leaked"
        assert self.scheduler.table.num_running == 0
        assert (self.scheduler.table.first_step == NEVER).all()
        assert self.scheduler.num_waiting == 0
        assert not self.scheduler._leaders
        assert not self.scheduler._prefilling


def ask(name: str, prompt: int | Iterable[int] = 20, max_tokens: int = 10, **fields: Any) -> Request:
    """A request of this name. prompt: ids, or how many (then ids that depend on the name)."""
    if isinstance(prompt, int):
        prompt = np.random.default_rng(list(name.encode())).integers(1, 500, prompt)
    fields.setdefault("params", SamplingParams(seed=sum(name.encode())))
    return Request(name, np.array(list(prompt), np.int32), max_tokens, **fields)


def solo(request: Request, **options: Any) -> Completion:
    """The same request alone, with neither overlap nor cache nor chunks nor lack of blocks."""
    context = options.pop("max_context", 256)
    host = Host(overlap=False, prefix_cache=False, max_step_tokens=context, max_context=context, **options)
    return host.run(request)[request.id]


def assert_same(found: Completion, expected: Completion) -> None:
    """Equal in all that may not depend on neighbours, schedule or cache."""
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.finish_reason == expected.finish_reason
    assert found.stop == expected.stop
    assert found.error == expected.error
    assert list(found.logprobs) == list(expected.logprobs)
    for mode, logprobs in expected.logprobs.items():
        np.testing.assert_array_equal(found.logprobs[mode], logprobs)
    for name in ("top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert (found.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for mode, logprobs in (expected.prompt_logprobs or {}).items():
        np.testing.assert_array_equal((found.prompt_logprobs or {})[mode], logprobs)
    assert sum(count for _, count in found.weight_versions) == len(found.token_ids)

"""What is refused, by the name of its field, and only for that request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from engine.errors import DuplicateRequest, PromptTooLong, RequestError, RequestTooLarge
from engine.request import SamplingParams, StopRule
from tests.engine.host import Host, ask, assert_same, solo


def refused(host: Host, name: str = "bad", *args: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        host.add(ask(name, *args, **fields))
    return caught.value


@pytest.fixture
def host() -> Host:
    return Host(max_context=64, runner={"num_blocks": 32})


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty"),
        ({"repetition_penalty": 1e39}, "repetition_penalty"),
        ({"presence_penalty": -1e39}, "presence_penalty"),
        ({"frequency_penalty": 1e300}, "frequency_penalty"),
        ({"allowed_ids": ()}, "allowed_ids"),
        ({"allowed_ids": (1, 512)}, "allowed_ids"),
        ({"allowed_ids": (-1,)}, "allowed_ids"),
        ({"logit_bias": {512: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"logit_bias": {5: 1e39}}, "logit_bias"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"sample_index": 2**32}, "sample_index"),
        ({"segment": -1}, "segment"),
    ],
)
def test_sampling_values(host: Host, params: dict[str, Any], field: str) -> None:
    error = refused(host, params=SamplingParams(**params))
    assert error.field == field
    assert error.code == "bad_request"


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0},
        {"temperature": 1e-6, "top_k": 10**9, "seed": 2**64 - 1, "sample_index": 2**32 - 1},
        {"allowed_ids": (0, 511), "logit_bias": {0: -5.0}, "presence_penalty": -2.0},
    ],
)
def test_sampling_values_at_their_edges_run(host: Host, params: dict[str, Any]) -> None:
    assert host.run(ask("a", 10, 3, params=SamplingParams(**params)))["a"].finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": []}, "token_ids"),
        ({"prompt": [1, 512]}, "token_ids"),
        ({"prompt": [-1, 5]}, "token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -1, "prompt_logprobs": True}, "max_tokens"),
        ({"sampled": np.zeros(19, np.bool_)}, "sampled"),
        ({"logprob_modes": ()}, "logprob_modes"),
        ({"logprob_modes": ("raw", "raw")}, "logprob_modes"),
        ({"logprob_modes": ("cooked",)}, "logprob_modes"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 513}, "top_logprobs"),
        ({"stop": StopRule(ids=frozenset({512}))}, "stop_ids"),
        ({"stop": StopRule(strings=(b"x", b""))}, "stop"),
    ],
)
def test_fields(host: Host, fields: dict[str, Any], field: str) -> None:
    assert refused(host, **fields).field == field


def test_ids_of_another_type(host: Host) -> None:
    request = ask("a")
    for ids in (request.token_ids.astype(np.int64), request.token_ids.reshape(2, -1)):
        with pytest.raises(RequestError, match="must be int32") as caught:
            host.add(type(request)("a", ids, 5))
        assert caught.value.field == "token_ids"


def test_stop_strings_need_the_bytes_of_the_ids() -> None:
    host = Host()
    host.engine._token_bytes = None
    assert refused(host, stop=StopRule(strings=(b"x",))).field == "stop"


@pytest.mark.parametrize(("length", "max_tokens"), [(64, 1), (65, 1), (1000, 5), (65, 0)])
def test_a_prompt_that_fills_the_context(host: Host, length: int, max_tokens: int) -> None:
    error = refused(host, "bad", length, max_tokens, prompt_logprobs=max_tokens == 0)
    assert isinstance(error, PromptTooLong)
    assert error.code == "prompt_too_long"


def test_a_score_may_fill_the_context_exactly(host: Host) -> None:
    ended = host.run(ask("a", 64, 0, prompt_logprobs=True))["a"]
    assert ended.finish_reason == "length"
    assert ended.prompt_logprobs is not None
    assert len(ended.prompt_logprobs["processed"]) == 64


@pytest.mark.parametrize(
    ("length", "max_tokens", "count", "reason"),
    [
        (1, 1, 1, "length"),
        (1, 63, 63, "length"),
        (1, 64, 63, "context_overflow"),
        (62, 2, 2, "length"),
        (62, 3, 2, "context_overflow"),
        (63, 1, 1, "length"),
        (63, 2, 1, "context_overflow"),
        (63, 10**9, 1, "context_overflow"),
    ],
)
def test_budgets_at_the_context_limit(host: Host, length: int, max_tokens: int, count: int, reason: str) -> None:
    healthy = ask("healthy", 20, 30)
    ended = host.run(healthy, ask("a", length, max_tokens))
    assert len(ended["a"].token_ids) == count
    assert ended["a"].finish_reason == reason
    assert_same(ended["healthy"], solo(healthy))


def test_what_can_never_fit_the_pool() -> None:
    host = Host(max_context=256, runner={"num_blocks": 5})
    assert isinstance(refused(host, "bad", 30, 36), RequestTooLarge)
    assert isinstance(refused(host, "bad", 65, 0, prompt_logprobs=True), RequestTooLarge)
    assert host.run(ask("a", 30, 35))["a"].finish_reason == "length"
    assert host.run(ask("b", 64, 0, prompt_logprobs=True))["b"].finish_reason == "length"


def test_an_id_is_taken_until_its_request_has_ended(host: Host) -> None:
    first = ask("a", 20, 10)
    host.add(first)
    error = refused(host, "a", 5, 2)
    assert isinstance(error, DuplicateRequest)
    assert (error.code, error.field) == ("duplicate", "id")
    host.step(2)
    assert refused(host, "a", 5, 2).field == "id"
    assert_same(host.run()["a"], solo(first))
    host.ended.clear()
    assert len(host.run(ask("a", 5, 2))["a"].token_ids) == 2


def test_a_refusal_leaves_no_trace(host: Host) -> None:
    healthy = ask("healthy", 20, 8)
    host.add(healthy)
    refused(host, prompt=[])
    refused(host, params=SamplingParams(temperature=-1))
    assert list(host.run()) == ["healthy"]
    assert host.engine.stats().waiting == 0
    host.check_empty()

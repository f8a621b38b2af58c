"""What a caller hands over that is something else: refused by the argument's name, before anything is sent."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import BadRequest, ConnectionLost, Turn, TurnDone, WeightsPrepared
from rollout.client import RolloutClient, sampling, turn
from rollout.client.values import int32, mapping, number, seconds, several, uint8, whole

IDS = np.array([1, 2], np.int32)
DONE = TurnDone(
    id="1",
    trajectory_id="t",
    turn=Turn(index=0, start=1, length=1, finish_reason="stop"),
    total_len=2,
    token_ids=IDS[:1],
    logprobs=np.zeros(1, np.float32),
)
PREPARED = WeightsPrepared(id="1", update_id="u", version=1, digest="sha256:0", bytes=1, load_s=0.1)


@pytest.fixture(scope="module")
def client() -> Iterator[RolloutClient]:
    """Nobody is there to send anything to: what waits for a worker fails by its timeout, and not by a name."""
    with RolloutClient("tcp://127.0.0.1:9", timeout=0.1) as client:
        yield client


Ask = Callable[[RolloutClient, Any], Any]
Table = list[tuple[str, Ask]]


def of_group(*names: str) -> Table:
    return [(name, lambda client, value, name=name: client.group([1], **{name: value})) for name in names]


def of_chat(name: str) -> tuple[str, Ask]:
    said = [{"role": "user", "content": ""}]
    return name, lambda client, value: client.group(**{"messages": said, name: value})


INTEGERS: Table = [
    *of_group("n", "max_turns", "max_total_tokens", "priority", "min_version", "max_staleness"),
    *of_group("top_k", "seed", "max_tokens", "top_logprobs"),
    ("stop_ids[0]", lambda c, v: c.group([1], stop_ids=[v])),
    ("sample_indices[0]", lambda c, v: c.group([1], sample_indices=[v])),
    ("step", lambda c, v: c.submit(c.group([1]), step=v)),
    ("groups_needed", lambda c, v: c.submit(c.group([1]), groups_needed=v)),
    ("min_complete", lambda c, v: c.submit(c.group([1]), min_complete=v)),
    ("max_retries", lambda c, v: c.submit(c.group([1]), max_retries=v)),
    ("max_tokens", lambda c, v: c.continue_(DONE, max_tokens=v)),
    ("version", lambda c, v: c.prepare_weights("weights", v, timeout=0.1)),
    ("version", lambda c, v: c.update_weights("weights", v, timeout=0.1)),
    ("version", lambda c, v: c.push_weights({}, v)),
]
FLOATS: Table = of_group(
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
)
SECONDS: Table = [
    *of_group("turn_deadline_s", "tool_deadline_s", "trajectory_deadline_s"),
    ("drain_timeout", lambda c, v: c.drain(v)),
    ("drain_timeout", lambda c, v: c.commit_weights(PREPARED, drain_timeout=v, timeout=0.1)),
    ("timeout", lambda c, v: c.ping(timeout=v)),
    ("timeout", lambda c, v: c.connect(timeout=v)),
    ("timeout", lambda c, v: c.score([[1]], timeout=v)),
    ("timeout", lambda c, v: type(c)("tcp://127.0.0.1:9", timeout=v).close()),
    ("reconnect_timeout", lambda c, v: type(c)("tcp://127.0.0.1:9", reconnect_timeout=v).close()),
]
SCORES: Table = [
    ("turn_reward", lambda c, v: c.continue_(DONE, turn_reward=v)),
    ("reward", lambda c, v: c.continue_(DONE, done=True, reward=v)),
    ("rewards.format", lambda c, v: c.continue_(DONE, done=True, rewards={"format": v})),
    ("logit_bias", lambda c, v: c.group([1], logit_bias={1: v})),
]
LISTS: Table = [
    *of_group("trajectory_ids", "sample_indices", "stop_ids", "stop", "logprobs", "prompt_source", "script"),
    of_chat("messages"),
    of_chat("tools"),
    ("groups", lambda c, v: c.submit(v)),
    ("resume", lambda c, v: c.submit(resume=v)),
    ("batch_ids", lambda c, v: c.cancel(batch_ids=v)),
    ("sequences", lambda c, v: c.score(v)),
    ("sampled", lambda c, v: c.score([[1]], sampled=v)),
]
MAPS: Table = [
    *of_group("metadata", "logit_bias"),
    of_chat("template_options"),
    ("config", lambda c, v: c.group([1], environment="e", config=v)),
    ("rewards", lambda c, v: c.continue_(DONE, done=True, rewards=v)),
    ("checksums", lambda c, v: c.prepare_weights("weights", 1, checksums=v)),
]


def refused(client: RolloutClient, ask: Ask, value: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        ask(client, value)
    return str(caught.value.field)


@pytest.mark.parametrize(("name", "ask"), INTEGERS)
@given(value=st.floats() | st.integers(-3, 9).map(float) | st.booleans() | st.integers(0, 9).map(str))
@settings(max_examples=25, deadline=None)
def test_only_integers_are_integers(client: RolloutClient, name: str, ask: Ask, value: Any) -> None:
    for form in (value, np.asarray(value)[()]):
        assert refused(client, ask, form) == name


@pytest.mark.parametrize(("name", "ask"), [*INTEGERS, *FLOATS, *SECONDS, *SCORES])
def test_one_rule_for_numbers(client: RolloutClient, name: str, ask: Ask) -> None:
    """An array or a tensor without dimensions is the number that it holds; one with dimensions is none."""
    kind = np.int64 if (name, ask) in INTEGERS else np.float32
    one = 1 if kind is np.int64 else 0.0625
    for value in (one, kind(one), np.array(one, kind), torch.tensor(one)):
        # Nobody is there: what waits for a worker has got past its arguments.
        with contextlib.suppress(ConnectionLost):
            ask(client, value)
    for value in (np.array([one], kind), np.array([], kind), np.array("1")):
        assert refused(client, ask, value) == name


@pytest.mark.parametrize(("name", "ask"), SECONDS)
@pytest.mark.parametrize("value", [True, "2", 0, -1.5, float("nan"), [2], np.float64(0)])
def test_seconds_are_positive_numbers(client: RolloutClient, name: str, ask: Ask, value: Any) -> None:
    assert refused(client, ask, value) == name


@pytest.mark.parametrize(("name", "ask"), SCORES)
@pytest.mark.parametrize("value", ["1.5", b"1", [1, 2], float("nan"), -float("inf"), 10**400, {}])
def test_scores_are_numbers(client: RolloutClient, name: str, ask: Ask, value: Any) -> None:
    assert refused(client, ask, value) == name


@pytest.mark.parametrize(("name", "ask"), LISTS)
@pytest.mark.parametrize("value", [7, 2.5, True, {"a": 1}, b"ab", np.array(7)])
def test_lists_are_lists(client: RolloutClient, name: str, ask: Ask, value: Any) -> None:
    assert refused(client, ask, value) == name


@pytest.mark.parametrize(("name", "ask"), MAPS)
@pytest.mark.parametrize("value", [7, 2.5, True, "ab", [1]])
def test_maps_are_maps(client: RolloutClient, name: str, ask: Ask, value: Any) -> None:
    assert refused(client, ask, value) == name


def test_every_number_of_a_call_is_tried() -> None:
    """A new argument does not come without a refusal."""
    tried = {name.partition("[")[0] for name, _ in (*INTEGERS, *FLOATS, *SECONDS, *SCORES)}
    calls = [member for name, member in inspect.getmembers(RolloutClient, callable) if not name.startswith("_")]
    for call in [RolloutClient, *calls]:
        for name, parameter in inspect.signature(call).parameters.items():
            kind = str(parameter.annotation)
            assert name in tried or not {"int", "float", "int | None", "float | None"} & {kind}, (call, name)


def test_numbers_of_numpy_are_taken(client: RolloutClient) -> None:
    group = client.group(
        IDS,
        n=np.int64(2),
        top_k=np.int16(3),
        temperature=np.float32(0.5),
        max_tokens=np.uint8(9),
        seed=np.uint64(2**63),
    )
    assert len(group.trajectory_ids) == 2
    law = group.sampling
    assert (law.top_k, law.temperature, law.max_tokens, law.seed) == (3, 0.5, 9, 2**63)
    assert turn(max_tokens=np.int32(4)).max_tokens == 4
    assert sampling(stop_ids=np.array([4, 5])).stop_ids == (4, 5)


def test_what_is_sent_are_plain_numbers() -> None:
    assert type(whole(np.int32(3), "n")) is int
    assert type(seconds(np.float32(3), "timeout")) is float
    assert number(np.array(0.5), "reward") == 0.5
    assert number(True, "reward") == 1.0  # an answer is right or not
    assert uint8([True, False], "sampled").tolist() == [1, 0]
    assert int32([], "prompt_ids").dtype == np.int32
    assert several("one", "stop") == ("one",)
    assert several({3}, "stop_ids") == (3,)
    assert mapping(None, "metadata") == {}


@pytest.mark.parametrize("values", [[2.5], [256], [-1], ["1"], [None], [[1]], 1])
def test_masks_are_small_integers(values: Any) -> None:
    """numpy alone would make 2 of 2.5, and 255 of -1."""
    with pytest.raises(BadRequest) as caught:
        uint8(values, "sampled[0]")
    assert caught.value.field == "sampled[0]"


OTHERS: Table = [
    ("turn_done", lambda c, v: c.continue_(v)),
    ("prepared", lambda c, v: c.commit_weights(v)),
    ("prepared", lambda c, v: c.abort_weights(v)),
    ("groups[1]", lambda c, v: c.submit([c.group([1]), v])),
    ("resume[0]", lambda c, v: c.submit(resume=[v])),
    ("mode", lambda c, v: c.commit_weights(PREPARED, mode=v)),
    ("on_timeout", lambda c, v: c.update_weights("weights", 1, on_timeout=v)),
    ("sampling", lambda c, v: c.score([[1]], v)),
    ("path", lambda c, v: c.update_weights(v, 1)),
    ("digest", lambda c, v: c.commit_weights(PREPARED, digest=v)),
    ("update_id", lambda c, v: c.prepare_weights("weights", 1, update_id=v)),
]


@pytest.mark.parametrize(("name", "ask"), OTHERS)
@pytest.mark.parametrize(
    "value",
    [7, 2.5, True, b"ab", ["x"], {1: 2}, np.array([1, 2]), object()],
    ids=["int", "float", "bool", "bytes", "list", "dict", "array", "object"],
)
def test_everything_else_is_what_it_should_be(client: RolloutClient, name: str, ask: Ask, value: Any) -> None:
    assert refused(client, ask, value).partition(".")[0] == name


def test_text_that_cannot_be_sent(client: RolloutClient) -> None:
    with pytest.raises(BadRequest, match="UTF-8"):
        client.commit_weights(PREPARED, digest="\udc80")

"""Field reports on tokens and their logprobs, seen by a client of the whole worker: what the engine's own tests show
must survive submit, environment, record and wire. The number in a name is the report's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests import rigs
from tests.engine.reference_law import log_softmax
from tests.rollout.raw_client import RawClient, group
from tests.rollout.real_worker import real_worker
from tests.rollout.unharmed import sampled, unharmed, whole
from tests.rollout.workers import WorkerThread

VOCAB = 64


def steps() -> np.ndarray:
    """2, 1, 0, -1 on ids 0 to 3 after every token, and nothing else."""
    row = np.full((1, VOCAB), -30.0)
    row[0, :4] = [2, 1, 0, -1]
    return row


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerThread]:
    """All ids equally likely, under a generation_config.json that would have it otherwise."""
    loud = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "max_new_tokens": 2}
    path = rigs.write_table(tmp_path_factory.mktemp("flat"), np.zeros((1, VOCAB)), generation_config=loud)
    with real_worker(path, max_context=64) as served:
        yield served


def ask(served: WorkerThread, *groups: dict[str, Any], batch: str = "b") -> dict[str, dict[str, Any]]:
    """Records by trajectory id, each looked at, from a worker that is afterwards as it was."""
    with unharmed(served.address), RawClient(served.address) as client:
        client.hello(timeout=30)
        reply = client.call("submit", 30, batch_id=batch, groups=list(groups))
        assert reply["type"] == "accepted", reply
        count = sum(len(one["trajectory_ids"]) for one in groups)
        records = [whole(client.record(60)) for _ in range(count)]
        client.event("batch_done", 30)
    return {record["trajectory_id"]: record for record in records}


def refused(served: WorkerThread, *groups: dict[str, Any]) -> dict[str, Any]:
    with unharmed(served.address), RawClient(served.address) as client:
        client.hello(timeout=30)
        error: dict[str, Any] = client.call("submit", 30, batch_id="b", groups=list(groups))["error"]
    return error


# 1: logprobs are of the law that was sampled, from the first token of a turn on, in every turn.


@pytest.mark.parametrize(
    ("temperature", "known"),
    [(0.5, (-0.145078, -2.145078)), (1.0, (-0.440190, -1.440190)), (2.0, (-0.787339, -1.287339))],
)
def test_01_every_token_of_every_turn_carries_the_tempered_logprob(
    tmp_path: Path, temperature: float, known: tuple[float, float]
) -> None:
    script = [{"observation": np.array([9], np.int32)}]
    with real_worker(rigs.write_table(tmp_path, steps()), max_context=64) as served:
        asked = group(
            n=24, max_tokens=2, sampling={"temperature": temperature, "seed": 3}, environment={"script": script}
        )
        records = ask(served, asked)
    table, seen = log_softmax(steps()[0] / temperature), [set[int](), set[int]()]
    assert table[:2] == pytest.approx(known, abs=1e-4)
    for record in records.values():
        segment = record["segments"][0]
        at = np.flatnonzero(segment["loss_mask"])
        assert at.tolist() == [3, 4, 6, 7]
        np.testing.assert_allclose(segment["logprobs"][at], table[segment["token_ids"][at]], atol=1e-4)
        for turn, first in enumerate((3, 6)):
            seen[turn].add(int(segment["token_ids"][first]))
    assert all({0, 1} <= ids for ids in seen)


# 3: a field that the client left out is neutral, whatever the checkpoint would like.


def test_03_what_is_left_out_is_neutral_and_echoed(flat: WorkerThread) -> None:
    bare = {"id": "g", "prompt": np.array([9], np.int32), "trajectory_ids": [f"t{i}" for i in range(60)]}
    records = ask(flat, bare | {"sampling": {"max_tokens": 5}})
    ids = np.concatenate([sampled(record) for record in records.values()])
    assert len(ids) == 300
    assert len(set(ids.tolist())) > 20
    for record in records.values():
        segment = record["segments"][0]
        np.testing.assert_allclose(segment["logprobs"][1:], -np.log(VOCAB), atol=1e-5)
        echoed = record["sampling"]
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        assert {name: echoed[name] for name in neutral} == neutral
        assert echoed["seed"] is not None


def test_03_max_tokens_left_out_fills_the_context(flat: WorkerThread) -> None:
    (record,) = ask(flat, group(max_tokens=None)).values()
    assert (len(sampled(record)), record["finish_reason"]) == (61, "context_overflow")


# 7: temperatures near zero.


def test_07_tiny_temperatures_beside_a_plain_neighbour(tmp_path: Path) -> None:
    row = np.zeros((1, VOCAB))
    row[0, 7], row[0, 8] = 40, 39
    tiny = (0.0, 1e-300, 1e-38, 1e-6, 1e-5, 1e-4, 1e-3)
    neighbour = group("plain", max_tokens=6, sampling={"seed": 3})
    with real_worker(rigs.write_table(tmp_path, row)) as served:
        alone = ask(served, neighbour)["plain.0"]
        records = ask(
            served, *(group(f"t{t}", max_tokens=6, sampling={"seed": 3, "temperature": t}) for t in tiny), neighbour
        )
        for bad in (-1.0, -1e-9, float("nan"), float("inf")):
            error = refused(served, group(sampling={"temperature": bad}))
            assert (error["code"], error["field"]) == ("bad_request", "groups[0].sampling.temperature")
    assert sampled(records["plain.0"]) == sampled(alone)
    for t in tiny:
        assert sampled(records[f"t{t}.0"]) == [7] * 6
        if t > 0:
            assert np.abs(records[f"t{t}.0"]["segments"][0]["logprobs"]).max() < 1e-3


# 10 and 11: seeds.


def test_10_a_seeded_trajectory_repeats_itself_beside_unseeded_ones(flat: WorkerThread) -> None:
    subject = group("a", max_tokens=16, sampling={"seed": 17, "temperature": 0.9})
    other = group("b", n=4, prompt=[4, 5], max_tokens=16, sampling={"temperature": 1.3})
    alone = sampled(ask(flat, subject)["a.0"])
    unseeded = set()
    for before in (True, False):
        records = ask(flat, *((subject, other) if before else (other, subject)))
        assert sampled(records["a.0"]) == alone
        unseeded |= {tuple(sampled(records[f"b.{i}"])) for i in range(4)}
        # The seed that was drawn is told, and gives the same again.
        drawn = records["b.2"]["sampling"]["seed"]
        again = ask(flat, group("b", n=4, prompt=[4, 5], max_tokens=16, sampling={"temperature": 1.3, "seed": drawn}))
        assert sampled(again["b.2"]) == sampled(records["b.2"])
    assert len(unseeded) == 8


@pytest.mark.parametrize("seed", [None, 7, 0, 2**64 - 1])
def test_11_samples_of_one_prompt_differ(flat: WorkerThread, seed: int | None) -> None:
    asked = group(n=8, max_tokens=16, sampling={"seed": seed})
    first = [sampled(record) for _, record in sorted(ask(flat, asked).items())]
    assert len(set(map(tuple, first))) == 8
    again = [sampled(record) for _, record in sorted(ask(flat, asked).items())]
    assert (first == again) == (seed is not None)
    separate = [group(f"s{i}", max_tokens=16, sampling={"seed": 7 + i}) for i in range(8)]
    assert len({tuple(sampled(record)) for record in ask(flat, *separate).values()}) == 8


def test_11_greedy_samples_are_equal(tmp_path: Path) -> None:
    with real_worker(rigs.write_table(tmp_path, steps())) as served:
        records = ask(served, group(n=8, max_tokens=4, sampling={"temperature": 0.0}))
    assert {tuple(sampled(record)) for record in records.values()} == {(0, 0, 0, 0)}


# 13 and 14: stops.

PIECES = ["Hel", "lo S", "TO", "P now", "x", "caf", "Ã", "©", "<end>", "<eot>"]


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerThread]:
    """Spells 'Hello STOP nowxcafé' and then ends with <end> or, after id 15, with <eot>."""
    path = tmp_path_factory.mktemp("speller")
    # Ids 0 to 9 are the pieces; the two bytes of an e with an acute are tokens of their own.
    chain = [(20, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 9), (15, 9)]
    rows, state_of = rigs.script(32, chain)
    rigs.write_table(path, rows, state_of, eos=8, generation_config={"eos_token_id": [8, 9]})
    byte_level = {piece.replace(" ", "Ġ"): i for i, piece in enumerate(PIECES)}
    vocabulary = byte_level | {f"<{i}>": i for i in range(len(PIECES), 32)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    with real_worker(path) as served:
        yield served


def turn(served: WorkerThread, max_tokens: int = 16, start: int = 20, **sampling: Any) -> dict[str, Any]:
    law = {"temperature": 0.0, "ignore_eos": False, **sampling}
    (record,) = ask(served, group(prompt=[start], max_tokens=max_tokens, sampling=law)).values()
    ended: dict[str, Any] = record["segments"][0]["turns"][0] | {"ids": sampled(record)}
    return ended


def test_13_every_eos_of_the_list_ends_a_turn_and_stop_ids_add_up(speller: WorkerThread) -> None:
    assert turn(speller)["ids"] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert turn(speller, start=15)["ids"] == [9]
    added = turn(speller, stop_ids=[3])
    assert (added["ids"], added["finish_reason"]) == ([0, 1, 2, 3], "stop")
    assert turn(speller, stop_ids=[9])["ids"][-1] == 8
    ignored = turn(speller, ignore_eos=True, max_tokens=12)
    assert (ignored["ids"][-3:], ignored["finish_reason"]) == ([9, 9, 9], "length")
    both = turn(speller, ignore_eos=True, stop_ids=[9])
    assert (both["ids"][-2:], both["finish_reason"]) == ([8, 9], "stop")


@pytest.mark.parametrize(
    ("stop", "ids", "found"),
    [
        (["STOP"], [0, 1, 2, 3], "STOP"),
        (["ll"], [0, 1], "ll"),
        (["P now", "STO"], [0, 1, 2], "STO"),
        (["café"], [0, 1, 2, 3, 4, 5, 6, 7], "café"),
        (["nothing of it"], [0, 1, 2, 3, 4, 5, 6, 7, 8], None),
    ],
)
def test_14_a_stop_string_ends_at_the_token_that_completes_it(
    speller: WorkerThread, stop: list[str], ids: list[int], found: str | None
) -> None:
    ended = turn(speller, stop=stop)
    assert (ended["ids"], ended["finish_reason"]) == (ids, "stop")
    assert ended["stop"] == (found or "8")


def test_14_neither_prompt_nor_an_earlier_turn_triggers_a_stop_string(speller: WorkerThread) -> None:
    script = [{"observation": np.array([0, 1, 2], np.int32)}]
    law = {"temperature": 0.0, "stop": ["STOP"]}
    asked = group(prompt=[1, 2], max_tokens=1, sampling=law, environment={"script": script})
    (record,) = ask(speller, asked).values()
    # 'P now' after 'lo STO' of the prompt, and again after that of the observation.
    assert sampled(record) == [3, 3]
    assert [one["finish_reason"] for one in record["segments"][0]["turns"]] == ["length", "length"]
    assert turn(speller, max_tokens=4, stop=["STOP"])["finish_reason"] == "stop"


def test_14_what_a_turn_event_shows_is_what_the_record_holds(speller: WorkerThread) -> None:
    with unharmed(speller.address), RawClient(speller.address) as client:
        client.hello(timeout=30)
        law = {"temperature": 0.0, "stop": ["STOP"]}
        asked = group(prompt=[20], max_tokens=16, sampling=law, environment={"name": "remote"})
        client.call("submit", 30, batch_id="b", groups=[asked])
        event = client.event("turn_done", 30)
        client.call("continue", trajectory_id="g.0", turn=0, expected_len=event["total_len"], done=True)
        record = client.record(30)
    assert event["token_ids"].tolist() == sampled(record) == [0, 1, 2, 3]
    np.testing.assert_array_equal(event["logprobs"], record["segments"][0]["logprobs"][1:])


def test_14_an_empty_stop_string_is_refused(speller: WorkerThread) -> None:
    error = refused(speller, group(sampling={"stop": ["x", ""]}))
    assert (error["code"], error["field"]) == ("bad_request", "groups[0].sampling.stop[1]")


# 16: lengths at the limit, while a healthy trajectory runs.

BAD_BUDGETS = (0, -1, 2**62)


def test_16_lengths_at_the_limit_concern_their_own_request_only(flat: WorkerThread) -> None:
    healthy = group("healthy", max_tokens=60, sampling={"seed": 1})
    alone = sampled(ask(flat, healthy)["healthy.0"])
    with unharmed(flat.address), RawClient(flat.address) as client:
        client.hello(timeout=30)
        client.call("submit", 30, batch_id="h", groups=[healthy])
        for length in (0, 1, 63, 64, 65, 1000):
            for budget in (0, 1, 2, None, -1, 2**31 - 1, 2**62):
                name = f"{length}+{budget}"
                asked = group(name, prompt=[1] * length, max_tokens=budget)
                if budget is None:
                    asked["sampling"]["max_tokens"] = None
                reply = client.call("submit", 30, batch_id=name, groups=[asked])
                if length in (1, 63) and budget not in BAD_BUDGETS:
                    assert reply["type"] == "accepted", reply
                    continue
                if budget in BAD_BUDGETS:
                    wanted = ("bad_request", "groups[0].sampling.max_tokens")
                else:
                    wanted = ("prompt_too_long" if length >= 64 else "bad_request", "groups[0].prompt")
                assert (reply["error"]["code"], reply["error"]["field"]) == wanted, name
        records = {(record := whole(client.record(60)))["trajectory_id"]: record for _ in range(9)}
    assert sampled(records["healthy.0"]) == alone
    ends = {name: (len(sampled(record)), record["finish_reason"]) for name, record in records.items()}
    del ends["healthy.0"]
    assert ends == {
        "1+1.0": (1, "length"),
        "1+2.0": (2, "length"),
        "1+None.0": (63, "context_overflow"),
        f"1+{2**31 - 1}.0": (63, "context_overflow"),
        "63+1.0": (1, "length"),
        "63+2.0": (1, "context_overflow"),
        "63+None.0": (1, "context_overflow"),
        f"63+{2**31 - 1}.0": (1, "context_overflow"),
    }


# 18: ids of the head's padding.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_18_padded_ids_come_back_in_the_next_turn(tmp_path: Path, temperature: float) -> None:
    rows = np.zeros((1, 151_936), np.float32)
    rows[0, 151_708] = 20.0
    script = [{"observation": np.array([8], np.int32)}]
    with real_worker(rigs.write_table(tmp_path, rows), max_running=4, kv_tokens=512) as served:
        asked = group(
            max_tokens=4, sampling={"temperature": temperature, "seed": 2}, environment={"script": script * 2}
        )
        (record,) = ask(served, asked).values()
        assert sampled(record).count(151_708) > 6
        assert record["finish_reason"] == "length"
        resumed = group("again", prompt=record["segments"][0]["token_ids"][:10].tolist(), max_tokens=1)
        (again,) = ask(served, resumed).values()
        assert len(sampled(again)) == 1
        error = refused(served, group(prompt=[151_936]))
        assert error["field"] == "groups[0].prompt"


# 20 and 22: the prefix cache and preemption, over turns of a group.


def test_20_turns_over_whole_blocks_equal_an_uncached_forward(tmp_path: Path) -> None:
    path = rigs.write_rand(tmp_path, rigs.RandModel(seed=5))
    reference = rigs.Reference(path)
    with real_worker(path, max_context=256) as served:
        for length in (16, 31, 33):
            prompt = np.random.default_rng(length).integers(0, 512, length).tolist()
            script = [{"observation": np.array([7] * k, np.int32)} for k in (1, 16 - length % 16, 16)]
            law = {"temperature": 0.0}
            asked = group(n=3, prompt=prompt, max_tokens=8, sampling=law, environment={"script": script})
            for record in ask(served, asked).values():
                segment = record["segments"][0]
                logprobs = reference.logprobs(segment["token_ids"].tolist())
                at = np.flatnonzero(segment["loss_mask"])
                np.testing.assert_allclose(segment["logprobs"][at], logprobs[at], atol=1e-4)


def test_22_a_preempted_trajectory_equals_its_run_alone(tmp_path: Path) -> None:
    path = rigs.write_rand(tmp_path, rigs.RandModel(seed=6))
    asked = [group(f"g{i}", prompt=range(i, i + 16), max_tokens=96, sampling={"seed": 40 + i}) for i in range(3)]
    with real_worker(path, kv_tokens=4096) as served:
        alone = {name: record for one in asked for name, record in ask(served, one).items()}
    with real_worker(path, kv_tokens=160) as served:
        together = ask(served, *asked)
        with RawClient(served.address) as client:
            client.hello()
            assert client.call("status")["engine"]["preemptions_total"] >= 1
    for name, record in together.items():
        assert sampled(record) == sampled(alone[name])
        assert len(sampled(record)) == 96
        np.testing.assert_allclose(record["segments"][0]["logprobs"], alone[name]["segments"][0]["logprobs"], atol=1e-4)


def forget(client: RawClient) -> None:
    """Leave a result with the worker."""
    client.call("submit", batch_id="b", groups=[group(max_tokens=1)])
    client.record(ack=False)


def test_unharmed_notices(tmp_path: Path) -> None:
    """The look before and after can fail: a result that nobody took, and a traceback in the log."""
    path = rigs.write_table(tmp_path, np.zeros((1, VOCAB)))
    with real_worker(path) as served, RawClient(served.address) as client:
        client.hello()
        with pytest.raises(pytest.fail.Exception), unharmed(served.address, timeout=1.0):
            forget(client)
        client.send("ack", trajectory_ids=["g.0"])
        with pytest.raises(AssertionError, match="on purpose"), unharmed(served.address):
            logging.getLogger("rollout").error("oh", exc_info=ValueError("on purpose"))
        with unharmed(served.address, provoked="on purpose"):
            logging.getLogger("rollout").error("oh", exc_info=ValueError("on purpose"))
        with pytest.raises(AssertionError), unharmed(served.address, smoke=[1, 2]):
            pass

"""Field reports on what is sampled and how it is scored, on the real engine. Tests carry their reports' numbers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.request import Completion, SamplingParams
from tests.engine.real import MODES, Real, ask, same, whole
from tests.engine.reference_law import log_softmax, reference
from tests.rigs import write_table

VOCAB = 64
OTHERS = -30.0


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """TABLE checkpoints: `flat` everywhere; `steps`: 2, 1, 0, -1 everywhere; `peak`: 40 on id 7, 39 on id 8."""
    root = tmp_path_factory.mktemp("tables")
    steps = np.full((1, VOCAB), OTHERS)
    steps[0, :4] = [2, 1, 0, -1]
    peak = np.zeros((1, VOCAB))
    peak[0, 7], peak[0, 8] = 40, 39
    loud = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "eos_token_id": [3, 5]}
    return {
        "flat": write_table(root / "flat", np.zeros((1, VOCAB)), generation_config=loud),
        "steps": write_table(root / "steps", steps),
        "peak": write_table(root / "peak", peak),
    }


@pytest.fixture
def real(tables: dict[str, Path]) -> Iterator[Any]:
    """Makes engines over the tables; at the end each must be idle and well."""
    made: list[Real] = []

    def make(table: str, **options: Any) -> Real:
        made.append(Real(tables[table], **options))
        return made[-1]

    yield make
    for engine in made:
        engine.check_idle()


# --- 1: logprobs of the law that was sampled, from the first token on ---

KNOWN = {0.5: (-0.145078, -2.145078), 1.0: (-0.440190, -1.440190), 2.0: (-0.787339, -1.287339)}


@pytest.mark.parametrize("temperature", KNOWN)
@pytest.mark.parametrize("overlap", [False, True])
def test_report_1_first_and_second_token_carry_the_tempered_logprob(
    real: Any, temperature: float, overlap: bool
) -> None:
    requests = [
        ask(f"r{i}", [1, 2, 3], 2, seed=i, temperature=temperature, logprob_modes=MODES, top_logprobs=2)
        for i in range(40)
    ]
    done = real("steps", overlap=overlap).run(*requests)
    row = np.full(VOCAB, OTHERS)
    row[:4] = [2, 1, 0, -1]
    tempered, plain = log_softmax(row / temperature), log_softmax(row)
    for position in range(2):
        seen = {int(whole(completion, 2).token_ids[position]) for completion in done}
        assert {0, 1} <= seen
    for completion in done:
        ids = completion.token_ids
        np.testing.assert_allclose(completion.logprobs["processed"], tempered[ids], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs["temperature"], tempered[ids], atol=1e-4)
        np.testing.assert_allclose(completion.logprobs["raw"], plain[ids], atol=1e-4)
        assert completion.top_ids is not None
        assert completion.top_ids.tolist() == [[0, 1], [0, 1]]
        np.testing.assert_allclose(completion.top_logprobs, [KNOWN[temperature]] * 2, atol=1e-4)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.5, "top_k": 2},
        {"temperature": 2.0, "top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.5},
        {"allowed_ids": (1, 3), "logit_bias": {3: 1.0}},
    ],
    ids=str,
)
def test_report_1_holds_for_every_part_of_the_law_over_a_reply(real: Any, params: dict[str, Any]) -> None:
    row = np.full(VOCAB, OTHERS, np.float32)
    row[:4] = [2, 1, 0, -1]
    start = [1, 2, 3, 1]
    (done,) = real("steps").run(ask("a", start, 12, seed=5, logprob_modes=MODES, **params))
    ids = start + whole(done, 12).token_ids.tolist()
    for position in range(12):
        past = ids[: len(start) + position]
        sampled = [i >= len(start) for i in range(len(past))]
        wanted = reference(row, SamplingParams(**params), past, sampled).modes[:, ids[len(start) + position]]
        found = [done.logprobs[mode][position] for mode in MODES]
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_report_1_holds_for_scored_prompts(real: Any) -> None:
    start = [1, 0, 2, 0, 0, 3]
    (done,) = real("steps").run(
        ask("a", start, 1, temperature=0.5, logprob_modes=("temperature", "raw"), prompt_logprobs=True)
    )
    row = np.full(VOCAB, OTHERS)
    row[:4] = [2, 1, 0, -1]
    assert done.prompt_logprobs is not None
    for mode, temperature in (("temperature", 0.5), ("raw", 1.0)):
        scores = done.prompt_logprobs[mode]
        assert np.isnan(scores[0])
        np.testing.assert_allclose(scores[1:], log_softmax(row / temperature)[start[1:]], atol=1e-4)


# --- 3: nothing but the EOS list comes from the checkpoint's generation_config ---


def test_report_3_defaults_are_neutral_whatever_the_checkpoint_says(real: Any) -> None:
    engine = real("flat")
    done = engine.run(*(ask(f"r{i}", [9], 3, seed=i) for i in range(100)))
    tokens = np.concatenate([whole(completion, 3).token_ids for completion in done])
    assert len(set(tokens.tolist())) > 20
    for completion in done:
        np.testing.assert_allclose(completion.logprobs["processed"], -4.158883, atol=1e-5)
    assert engine.loaded.model_config.eos_ids == (3, 5)


# --- 7: tiny temperatures ---


def test_report_7_tiny_temperatures_beside_a_plain_row(real: Any) -> None:
    neighbour = ask("plain", [1], 6, seed=3)
    (alone,) = real("peak").run(neighbour)
    tiny = [ask(f"t{t}", [1], 6, seed=3, temperature=t) for t in (0.0, 1e-38, 1e-6, 1e-5, 1e-4, 1e-3)]
    *cold, plain = real("peak").run(*tiny, neighbour)
    same(plain, alone, atol=0)
    for completion in cold:
        assert whole(completion, 6).token_ids.tolist() == [7] * 6
    for completion in cold[1:]:
        assert np.abs(completion.logprobs["processed"]).max() < 1e-3
    # Greedy is scored by the plain softmax: 40 against 39 and sixty-two zeros.
    np.testing.assert_allclose(cold[0].logprobs["processed"], -np.log1p(np.exp(-1)), atol=1e-4)


def test_report_7_tiny_temperatures_with_filters_and_equal_maxima(real: Any) -> None:
    params = {"temperature": 1e-6, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    done = real("flat").run(*(ask(f"r{i}", [1], 2, seed=i, **params) for i in range(30)))
    tokens = np.concatenate([whole(completion, 2).token_ids for completion in done])
    # Sixty-four equal maxima stay equal; top-p then takes the lowest 58 (57.6 of 64).
    assert len(set(tokens.tolist())) > 20
    assert tokens.max() < 58
    for completion in done:
        np.testing.assert_allclose(completion.logprobs["processed"], -np.log(58), atol=1e-5)


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, float("nan"), float("inf")])
def test_report_7_other_temperatures_are_refused_by_name(real: Any, temperature: float) -> None:
    engine = real("peak")
    with pytest.raises(RequestError) as refusal:
        engine.engine.add(ask("bad", [1], temperature=temperature))
    assert refusal.value.field == "temperature"


# --- 10: a seeded request repeats itself whoever is beside it ---


def test_report_10_a_seeded_request_repeats_itself_in_any_company(real: Any) -> None:
    subject = ask("a", [1, 2, 3], 16, seed=17, temperature=0.9)
    expected = real("flat").run(subject)[0].token_ids.tolist()
    rng = np.random.default_rng()  # the worker draws a seed for a request without one

    def neighbours(count: int, seed: int | None = None) -> list[Any]:
        seeds = [int(rng.integers(2**63)) if seed is None else seed + i for i in range(count)]
        return [ask(f"n{i}", [4, 5], 16, seed=s, temperature=1.3) for i, s in enumerate(seeds)]

    unseeded = set()
    for _ in range(4):
        assert real("flat").run(subject)[0].token_ids.tolist() == expected
        mine, other = real("flat").run(subject, *neighbours(1))
        assert mine.token_ids.tolist() == expected
        unseeded.add(tuple(other.token_ids.tolist()))
        assert real("flat").run(subject, *neighbours(1, seed=17))[0].token_ids.tolist() == expected
        assert real("flat").run(subject, *neighbours(7))[0].token_ids.tolist() == expected
        assert real("flat").run(*neighbours(7), subject)[-1].token_ids.tolist() == expected
        late = real("flat")
        for request in neighbours(3):
            late.engine.add(request)
        for _ in range(3):
            late.step()
        assert late.run(subject)[0].token_ids.tolist() == expected
    assert len(unseeded) == 4


@pytest.mark.parametrize(
    "options",
    [{"overlap": False}, {"lazy": True}, {"max_step_tokens": 8}, {"num_blocks": 8}, {"prefix_cache": False}],
    ids=str,
)
def test_report_10_in_any_schedule(real: Any, options: dict[str, Any]) -> None:
    """Chunked prefill, late devices and preemption (7 blocks for 3 requests of 4) change no token either."""
    laws = [{"temperature": 0.9}, {"top_p": 0.9}, {"frequency_penalty": 0.5, "top_k": 30}]
    requests = [ask(f"r{i}", range(20), 40, seed=17, sample_index=i, **law) for i, law in enumerate(laws)]
    expected = real("flat").run(*requests)
    engine = real("flat", **options)
    for found, wanted in zip(engine.run(*requests), expected, strict=True):
        same(found, wanted, atol=1e-6)
    assert (engine.engine.stats().preemptions_total > 0) == ("num_blocks" in options)


# --- 11: samples of one prompt differ ---


def different(done: list[Completion]) -> bool:
    return len({tuple(whole(completion, 16).token_ids.tolist()) for completion in done}) == len(done)


def test_report_11_samples_of_a_group_differ_pairwise_and_repeat_in_order(real: Any) -> None:
    group = [ask(f"g{i}", [1, 2], 16, seed=7, sample_index=i, group="g") for i in range(8)]
    first = real("flat").run(*group)
    assert different(first)
    again = real("flat").run(*group)
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in first]

    seeded = real("flat").run(*(ask(f"s{seed}", [1, 2], 16, seed=seed) for seed in range(7, 15)))
    assert different(seeded)
    # Sample i of seed 7 is not sample 0 of seed 7 + i.
    assert different([*first[1:], *seeded[1:]])
    segments = real("flat").run(*(ask(f"s{i}", [1, 2], 16, seed=7, segment=i) for i in range(8)))
    assert different([*first[1:], *segments])


def test_report_11_greedy_samples_are_equal(real: Any) -> None:
    done = real("peak").run(*(ask(f"g{i}", [1, 2], 16, seed=7, sample_index=i, temperature=0) for i in range(8)))
    assert {tuple(whole(completion, 16).token_ids.tolist()) for completion in done} == {(7,) * 16}
    assert len({tuple(completion.logprobs["processed"].tolist()) for completion in done}) == 1


# --- 18: ids above the tokenizer's ---


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = np.zeros((1, 151_936), np.float32)
    rows[0, 151_708], rows[0, 11] = 20.0, 19.0
    return write_table(tmp_path_factory.mktemp("padded"), rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_report_18_padded_ids_are_sampled_and_accepted_back(padded: Path, temperature: float) -> None:
    engine = Real(padded, max_running=2, max_step_tokens=32, max_context=64)
    (first,) = engine.run(ask("turn 1", [5, 6, 7], 4, temperature=temperature, seed=2))
    assert 151_708 in whole(first, 4).token_ids
    history = [5, 6, 7, *first.token_ids.tolist(), 8]
    sampled = np.array([False] * 3 + [True] * 4 + [False])
    (second,) = engine.run(ask("turn 2", history, 4, temperature=temperature, seed=2, segment=1, sampled=sampled))
    # The normaliser has all rows of the head, as a trainer's softmax.
    odds = np.array([20.0, 19.0, np.log(151_934)])
    known = dict(zip((151_708, 11), odds[:2] - np.logaddexp.reduce(odds), strict=True))
    for completion in (first, whole(second, 4)):
        for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs["processed"], strict=True):
            assert logprob == pytest.approx(known.get(token, -np.logaddexp.reduce(odds)), abs=1e-4)
    with pytest.raises(RequestError) as refusal:
        engine.engine.add(ask("beyond", [151_936]))
    assert refusal.value.field == "token_ids"
    engine.check_idle()


def test_report_18_penalties_and_alternatives_know_padded_ids(padded: Path) -> None:
    engine = Real(padded, max_running=2, max_step_tokens=32, max_context=64)
    (done,) = engine.run(ask("a", [5], 2, temperature=0, presence_penalty=5.0, top_logprobs=2))
    assert whole(done, 2).token_ids.tolist() == [151_708, 11]
    assert done.top_ids is not None
    assert done.top_ids.tolist() == [[151_708, 11]] * 2

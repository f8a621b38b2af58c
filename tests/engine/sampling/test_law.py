import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling import law
from engine.sampling.sampler import Sampler
from engine.step import SlotStart
from tests.engine.reference_law import reference

VOCAB = 24
MODES = ("processed", "temperature", "raw")

# A coarse grid, so that ties are common and equal in float32 and float64 alike.
LOGITS = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(lambda xs: np.array(xs, np.float32) / 8)
IDS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-6, 1e-3, 0.3, 0.7, 1.0, 1.5, 100.0]),
    top_k=st.sampled_from([0, 1, 2, 5, VOCAB - 1, VOCAB, 1000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 0.97]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    allowed_ids=st.none() | st.lists(IDS, min_size=1, max_size=VOCAB).map(tuple),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-100.0, -1.0, 0.5, 3.0]), max_size=3),
)
HISTORY = st.lists(st.tuples(IDS, st.booleans()), max_size=12)


def started(params: SamplingParams, token_ids: np.ndarray, sampled: np.ndarray, vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(vocab, 1, torch.device("cpu"))
    sampler.start(SlotStart(0, params, token_ids, sampled, MODES, 0))
    return sampler


def table(logits: np.ndarray, params: SamplingParams, token_ids: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """float32[3, V]: every id scored in the last position of the sequence."""
    # Beyond the end of the sequence the counts stay what they are at its end.
    every_id = np.arange(len(logits), dtype=np.int32)
    rows = torch.from_numpy(logits).expand(len(logits), -1)
    return started(params, token_ids, sampled, len(logits)).score(rows, 0, len(token_ids) - 1, every_id).numpy()


@settings(max_examples=200, deadline=None)
@given(LOGITS, PARAMS, HISTORY)
def test_every_logprob_is_the_reference_laws(logits: np.ndarray, params: SamplingParams, history: list) -> None:
    token_ids = np.array([0, *(token for token, _ in history)], np.int32)
    sampled = np.array([False, *(was for _, was in history)])
    wanted = reference(logits, params, token_ids.tolist(), sampled.tolist())
    assume(wanted.margin > 1e-5)
    np.testing.assert_allclose(table(logits, params, token_ids, sampled), wanted.modes, rtol=2e-6, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(LOGITS, PARAMS, HISTORY)
def test_what_is_sampled_is_in_the_support_and_scored_as_such(
    logits: np.ndarray, params: SamplingParams, history: list
) -> None:
    token_ids = np.array([0, *(token for token, _ in history)], np.int32)
    sampled = np.array([False, *(was for _, was in history)])
    wanted = reference(logits, params, token_ids.tolist(), sampled.tolist())
    assume(wanted.margin > 1e-5)
    sampler = started(params, token_ids, sampled)
    out = sampler.sample(torch.from_numpy(logits[None]), np.zeros(1, np.int32), np.array([len(token_ids)], np.int32))
    token = int(out.token_ids[0])
    assert int(out.flags[0]) == 0
    assert np.isfinite(wanted.chosen[token])
    if params.temperature == 0:
        assert token == int(np.argmax(wanted.chosen))
    np.testing.assert_allclose(out.logprobs[:, 0].numpy(), wanted.modes[:, token], rtol=2e-6, atol=2e-5)


def kept(logits: list[float], **params: float) -> list[int]:
    row = np.array(logits, np.float32)
    scores = table(row, SamplingParams(**params), np.zeros(1, np.int32), np.zeros(1, bool))  # type: ignore[arg-type]
    return np.flatnonzero(np.isfinite(scores[law.PROCESSED])).tolist()


def test_top_k_keeps_ties_with_the_kth() -> None:
    assert kept([1, 3, 2, 2, 2, 0], top_k=2) == [1, 2, 3, 4]
    assert kept([1, 3, 2, 2, 2, 0], top_k=4) == [1, 2, 3, 4]
    assert kept([1, 3, 2, 2, 2, 0], top_k=5) == [0, 1, 2, 3, 4]
    assert kept([5, 5, 5], top_k=1) == [0, 1, 2]


def test_top_p_takes_the_lowest_ids_of_a_tie_and_no_more_than_it_needs() -> None:
    flat = [1.0] * 10
    assert kept(flat, top_p=0.5) == [0, 1, 2, 3, 4]
    assert kept(flat, top_p=0.51) == [0, 1, 2, 3, 4, 5]
    assert kept(flat, top_p=0.1) == [0]
    assert kept([0, 9, 9, 0], top_p=0.5) == [1, 2]  # id 1 alone has just under a half
    assert kept([0, 9, 9, 9], top_p=0.3) == [1]


def test_top_p_however_small_keeps_the_most_likely_id() -> None:
    assert kept([0, 3, 1, 3], top_p=1e-30) == [1]
    assert kept([0, 3, 1, 3], top_p=5e-324) == [1]


def test_top_p_just_under_1_keeps_what_can_be_sampled() -> None:
    # The second id has a mass of 1e-13: cut by a float32 running mass, kept by the law.
    assert kept([30, 0, -200], top_p=float(np.nextafter(1, 0))) == [0, 1]


def test_min_p_is_relative_to_the_largest() -> None:
    logits = [0.0, float(np.log(0.5)) + 1e-4, float(np.log(0.5)) - 1e-4]
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept([2, 2, 1.999], min_p=1.0) == [0, 1]


def test_filters_apply_in_order() -> None:
    """top-p takes its share of what top-k left: 0.6 of {0.4, 0.3} is the first alone, of everything it is two."""
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(logits, top_p=0.55) == [0, 1]
    assert kept(logits, top_p=0.55, top_k=2) == [0]
    # After temperature: at T = 0.5 the first holds 0.16 of 0.30.
    assert kept(logits, top_p=0.5, temperature=0.5) == [0]
    assert kept(logits, top_p=0.5) == [0, 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-38, 1e-7, 1e-5, 1e-4, 1e-3])
def test_a_tiny_temperature_keeps_the_maximum_and_stays_finite(temperature: float) -> None:
    row = np.zeros(16, np.float32)
    row[7], row[8] = 40, 39
    scores = table(row, SamplingParams(temperature=temperature), np.zeros(1, np.int32), np.zeros(1, bool))
    assert np.isfinite(scores[:, 7]).all()
    assert abs(scores[law.PROCESSED, 7]) < 1e-3
    assert not np.isnan(scores).any()


def test_a_huge_temperature_is_flat_and_still_obeys_allowed_ids() -> None:
    row = np.array([40, -40, 3, 0], np.float32)
    params = SamplingParams(temperature=1e300, allowed_ids=(1, 2))
    scores = table(row, params, np.zeros(1, np.int32), np.zeros(1, bool))
    np.testing.assert_allclose(scores[law.PROCESSED], [-np.inf, -np.log(2), -np.log(2), -np.inf], rtol=1e-6)


def test_best_orders_ties_by_id() -> None:
    values = torch.tensor([[1.0, -0.0, 0.0, 1.0, float("-inf"), -2.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]])
    ids, best = law.best(values, 6)
    assert ids.tolist() == [[0, 3, 1, 2, 5, 4], [0, 1, 2, 3, 4, 5]]
    assert torch.equal(best, values.gather(1, ids))


def test_best_is_topk_where_nothing_ties() -> None:
    values = torch.randn(5, 1000, generator=torch.Generator().manual_seed(3)) * 1e3
    ids, best = law.best(values, 20)
    expected = values.topk(20, dim=-1)
    assert torch.equal(ids, expected.indices)
    assert torch.equal(best, expected.values)


def test_the_key_of_a_row_takes_the_seed_apart() -> None:
    row = law.row(SamplingParams(seed=(5 << 32) + 7, sample_index=3, segment=2), ("processed",), 0, VOCAB)
    assert row["key"].tolist() == [7, 5, 3, 2]

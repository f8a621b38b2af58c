from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.request import SamplingParams
from engine.sampling import law
from engine.sampling.sampler import Sampler
from engine.step import EMPTY_SUPPORT, NONFINITE, SlotStart
from tests.engine.reference_law import reference
from tests.engine.sampling.laws import (
    CPU,
    EVERY,
    GREEDY,
    LAWS,
    MODES,
    PROMPT,
    SAMPLED,
    VOCAB,
    expected,
    logits_of,
    sampler_of,
    step,
)

# --- rows are their own ---


def test_a_rows_token_depends_on_no_neighbour_row_or_batch_size() -> None:
    laws = [replace(params, seed=100 + i) for i, params in enumerate(EVERY.values())]
    logits = logits_of(len(laws))
    together = step(sampler_of(laws), logits, list(range(len(laws))))
    order = np.random.default_rng(0).permutation(len(laws)).tolist()
    shuffled = step(sampler_of(laws), logits[order], order)
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    torch.testing.assert_close(shuffled.logprobs, together.logprobs[:, order], rtol=1e-6, atol=1e-6)
    for slot, params in enumerate(laws):
        alone = step(sampler_of([params]), logits[slot : slot + 1], [0])
        assert alone.token_ids[0] == together.token_ids[slot], params
        torch.testing.assert_close(alone.logprobs[:, 0], together.logprobs[:, slot], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_logprobs_are_the_reference_laws(name: str) -> None:
    params, logits = EVERY[name], logits_of(8)
    out = step(sampler_of([replace(params, seed=i) for i in range(8)]), logits, list(range(8)))
    for row in range(8):
        wanted = expected(params, logits[row]).modes[:, int(out.token_ids[row])]
        np.testing.assert_allclose(out.logprobs[:, row].numpy(), wanted, rtol=1e-6, atol=1e-5)


def test_raw_and_alternatives_change_no_token_and_no_other_logprob() -> None:
    laws = [replace(params, seed=5) for params in EVERY.values()]
    logits, slots = logits_of(len(laws)), list(range(len(laws)))
    bare = step(sampler_of(laws, modes=("processed",)), logits, slots)
    full = step(sampler_of(laws, top=5), logits, slots)
    assert torch.equal(bare.token_ids, full.token_ids)
    assert torch.equal(bare.logprobs[:2], full.logprobs[:2])
    assert bare.top_ids is None
    hot = list(LAWS).index("hot")
    assert bare.logprobs[law.RAW, hot].isnan()
    assert full.logprobs[law.RAW].isfinite().all()


def test_seed_7_sample_1_is_not_seed_8_sample_0() -> None:
    laws = [SamplingParams(seed=7, sample_index=1), SamplingParams(seed=8), SamplingParams(seed=7, segment=1)]
    sampler, flat = sampler_of(laws), torch.zeros(3, VOCAB)
    tokens = torch.stack([step(sampler, flat, [0, 1, 2], position).token_ids for position in range(32)], dim=1)
    for one in range(3):
        for other in range(one):
            assert (tokens[one] == tokens[other]).sum() < 8


def test_a_slot_that_starts_again_forgets_its_former_law() -> None:
    logits = logits_of(1)
    used = sampler_of([LAWS["all"]])
    step(used, logits, [0])
    for params in (LAWS["plain"], LAWS["all"], GREEDY["greedy"], LAWS["allowed"]):
        used.start(SlotStart(0, params, PROMPT, SAMPLED, MODES, 0))
        again, fresh = step(used, logits, [0]), step(sampler_of([params]), logits, [0])
        assert torch.equal(again.token_ids, fresh.token_ids)
        assert torch.equal(again.logprobs, fresh.logprobs)


def test_slots_that_no_longer_ask_give_their_rows_back() -> None:
    """Counts and offsets are dense rows over the vocabulary: one slot at a time asks, so one row of each is enough."""
    sampler = sampler_of([LAWS["plain"]] * 3)
    for slot in (0, 1, 2, 0, 1):
        sampler.start(SlotStart(slot, LAWS["all"], PROMPT, SAMPLED, MODES, 0))
        sampler.start(SlotStart(slot, LAWS["plain"], PROMPT, SAMPLED, MODES, 0))
    assert len(sampler._penalties._counts.table) == len(sampler._offsets.table) == 1


# --- greedy ---


def test_greedy_takes_the_lowest_of_the_tied_and_scores_by_the_plain_softmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, -1.0]])
    out = step(sampler_of([GREEDY["greedy"]], 6), logits, [0])
    assert out.token_ids.tolist() == [1]
    plain = torch.log_softmax(logits.double(), -1)[0, 1]
    np.testing.assert_allclose(out.logprobs[:, 0].numpy(), [plain] * 3, rtol=1e-6)


def test_greedy_chooses_by_the_edited_logits_and_scores_by_the_unedited() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 8, 9]] = torch.tensor([5.0, 4.0, 4.5])
    cases = [
        (SamplingParams(temperature=0, presence_penalty=2.0), 9),
        (SamplingParams(temperature=0, logit_bias={8: 0.75}), 40),
        (SamplingParams(temperature=0, logit_bias={8: 1.25}), 8),
        (SamplingParams(temperature=0, allowed_ids=(8, 1)), 8),
        (SamplingParams(temperature=0, allowed_ids=(8, 40), repetition_penalty=2.0), 8),
        (SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=1.0), 40),
    ]
    sampler = sampler_of([params for params, _ in cases])
    out = step(sampler, logits.expand(len(cases), -1), list(range(len(cases))))
    assert out.token_ids.tolist() == [token for _, token in cases]
    plain = torch.log_softmax(logits[0].double(), -1)[out.token_ids]
    np.testing.assert_allclose(out.logprobs.numpy(), np.tile(plain.numpy(), (3, 1)), rtol=1e-6)


# --- edges ---


def test_one_allowed_id_is_certain() -> None:
    out = step(sampler_of([SamplingParams(allowed_ids=(31,), top_p=0.5, top_k=4)]), logits_of(1), [0])
    assert out.token_ids.tolist() == [31]
    assert float(out.logprobs[law.PROCESSED, 0]) == 0.0
    assert float(out.logprobs[law.TEMPERATURE, 0]) < -0.1


def test_padded_ids_can_be_sampled_and_allowed_ids_keep_them_out() -> None:
    """Nothing here knows how long the tokenizer is: ids are the head's rows."""
    vocab, tokenizer = 151_936, 151_669
    logits = torch.zeros(2, vocab)
    logits[:, 151_708] = 40.0
    inside = SamplingParams(allowed_ids=tuple(range(tokenizer)))
    out = step(sampler_of([SamplingParams(), inside], vocab), logits, [0, 1])
    assert int(out.token_ids[0]) == 151_708
    assert int(out.token_ids[1]) < tokenizer
    assert float(out.logprobs[law.PROCESSED, 1]) == pytest.approx(-np.log(tokenizer), rel=1e-6)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_flagged_and_touches_no_other(name: str, bad: float) -> None:
    logits = logits_of(3)
    laws = [LAWS["all"], EVERY[name], LAWS["top_p"]]
    clean = step(sampler_of(laws), logits, [0, 1, 2])
    logits[1, 3] = bad
    out = step(sampler_of(laws), logits, [0, 1, 2])
    assert out.flags.tolist() == [0, NONFINITE, 0]
    assert int(out.token_ids[1]) == 0
    assert out.logprobs[:, 1].isnan().all()
    assert torch.equal(out.token_ids[[0, 2]], clean.token_ids[[0, 2]])
    torch.testing.assert_close(out.logprobs[:, [0, 2]], clean.logprobs[:, [0, 2]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
def test_a_row_of_nothing_but_nan_or_minus_infinity_writes_id_0(name: str) -> None:
    logits = logits_of(2)
    logits[0], logits[1] = float("nan"), float("-inf")
    out = step(sampler_of([EVERY[name]] * 2), logits, [0, 1])
    assert out.flags.tolist() == [NONFINITE] * 2
    assert out.token_ids.tolist() == [0, 0]


def test_a_law_without_support_is_flagged() -> None:
    """Only values that the engine refuses at submit get this far; the device must stay safe all the same."""
    laws = [
        SamplingParams(allowed_ids=()),
        SamplingParams(allowed_ids=(2,), logit_bias={2: float("-inf")}, top_p=0.5),
        SamplingParams(temperature=0, allowed_ids=()),
        SamplingParams(logit_bias={2: float("inf")}),
        SamplingParams(),
    ]
    out = step(sampler_of(laws), logits_of(5), list(range(5)))
    assert out.flags.tolist() == [EMPTY_SUPPORT, EMPTY_SUPPORT, EMPTY_SUPPORT, NONFINITE, 0]
    assert out.token_ids[:4].tolist() == [0] * 4
    assert out.logprobs[:, :4].isnan().all()
    assert out.logprobs[:, 4].isfinite().all()


def test_extreme_temperatures_beside_each_other() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 7], row[0, 8] = 40.0, 39.0
    laws = [SamplingParams(temperature=t, seed=4) for t in (0.0, 1e-300, 1e-6, 1e-5, 1e-4, 1e-3)]
    neighbour = SamplingParams(seed=21)
    out = step(sampler_of([*laws, neighbour]), row.expand(7, -1), list(range(7)))
    alone = step(sampler_of([neighbour]), row, [0])
    assert out.token_ids[:6].tolist() == [7] * 6
    assert out.logprobs[law.PROCESSED, 1:6].abs().max() < 1e-3
    assert out.logprobs[:, :6].isfinite().all()
    assert out.token_ids[6] == alone.token_ids[0]
    assert torch.equal(out.logprobs[:, 6], alone.logprobs[:, 0])


# --- penalties over steps ---


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency", "all"])
def test_penalties_see_what_the_sampler_wrote(name: str) -> None:
    params = LAWS[name]
    sampler = sampler_of([LAWS["plain"], params, LAWS["all"]])
    ids, sampled = PROMPT.tolist(), SAMPLED.tolist()
    for length in range(len(PROMPT), len(PROMPT) + 30):
        logits = logits_of(3, seed=length)
        out = step(sampler, logits, [2, 0, 1], length)
        token = int(out.token_ids[2])
        wanted = reference(logits[2].numpy(), params, ids, sampled).processed
        np.testing.assert_allclose(float(out.logprobs[law.PROCESSED, 2]), wanted[token], rtol=1e-6, atol=1e-5)
        ids.append(token)
        sampled.append(True)


def test_a_slot_rebuilt_from_ids_goes_on_as_if_never_preempted() -> None:
    laws = [replace(params, seed=3) for params in (LAWS["all"], LAWS["frequency"], GREEDY["greedy penalised"])]

    def run(restart_at: int) -> list[list[int]]:
        sampler, ids = sampler_of(laws), [PROMPT.tolist() for _ in laws]
        for length in range(len(PROMPT), len(PROMPT) + 24):
            if length == restart_at:
                for slot, params in enumerate(laws):
                    known = np.array(ids[slot], np.int32)
                    flags = np.concatenate((SAMPLED, np.ones(length - len(PROMPT), bool)))
                    sampler.start(SlotStart(slot, params, known, flags, MODES, 0))
            tokens = step(sampler, logits_of(3, seed=length), [0, 1, 2], length).token_ids.tolist()
            for row, token in zip(ids, tokens, strict=True):
                row.append(token)
        return ids

    assert run(restart_at=18) == run(restart_at=-1)


# --- alternatives ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain", "cold", "top_p", "all", "greedy", "greedy penalised"])
def test_alternatives_are_the_best_of_the_primary_mode(name: str, mode: str) -> None:
    params, logits, count = EVERY[name], logits_of(2), 6
    modes = (mode, *(other for other in MODES if other != mode))
    out = step(sampler_of([params] * 2, top=count, modes=modes), logits, [0, 1])
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    for row in range(2):
        wanted = expected(params, logits[row]).modes[MODES.index(mode)]
        best = sorted(range(VOCAB), key=lambda i: (-wanted[i], i))[:count]
        assert out.top_ids[row].tolist() == best
        np.testing.assert_allclose(out.top_logprobs[row].numpy(), wanted[best], rtol=1e-6, atol=1e-5)


def test_alternatives_of_rows_that_want_different_things() -> None:
    sampler = Sampler(VOCAB, 4, CPU)
    wishes = [(0, MODES), (2, ("raw", "processed")), (5, ("processed",)), (10**6, ("temperature",))]
    for slot, (top, modes) in enumerate(wishes):
        sampler.start(SlotStart(slot, SamplingParams(temperature=2.0, top_k=3), PROMPT, SAMPLED, modes, top))
    logits = logits_of(1)
    out = step(sampler, logits.expand(4, -1), [0, 1, 2, 3])
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    assert out.top_ids.shape == (4, VOCAB)
    wanted = expected(SamplingParams(temperature=2.0, top_k=3), logits[0]).modes
    assert out.top_logprobs[0].isnan().all()
    for row, mode, count in ((1, law.RAW, 2), (2, law.PROCESSED, 5), (3, law.TEMPERATURE, VOCAB)):
        found = out.top_logprobs[row, :count].numpy()
        np.testing.assert_allclose(found, np.sort(wanted[mode])[::-1][:count], rtol=1e-6, atol=1e-5)
    assert out.top_logprobs[2, 3:5].isneginf().all()


# --- scores ---


@pytest.mark.parametrize("name", EVERY)
def test_scores_are_under_the_slots_law_with_each_positions_own_past(name: str) -> None:
    params, logits = EVERY[name], logits_of(len(PROMPT))
    sampler = sampler_of([LAWS["plain"], params])
    targets = np.append(PROMPT[1:], -1).astype(np.int32)
    # In two chunks, as a prompt that does not fit into one step.
    scores = torch.cat(
        (sampler.score(logits[:3], 1, 0, targets[:3]), sampler.score(logits[3:], 1, 3, targets[3:])), dim=1
    ).numpy()
    for at, target in enumerate(targets[:-1]):
        past = PROMPT[: at + 1].tolist(), SAMPLED[: at + 1].tolist()
        wanted = reference(logits[at].numpy(), params, *past).modes[:, target]
        np.testing.assert_allclose(scores[:, at], wanted, rtol=1e-6, atol=1e-5)
    assert np.isnan(scores[:, -1]).all()


def test_a_long_score_is_sliced_and_equals_its_parts() -> None:
    vocab, count = 8192, 1100  # three slices
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab, count + 1).astype(np.int32)
    sampler = Sampler(vocab, 1, CPU)
    params = SamplingParams(temperature=0.9, frequency_penalty=0.1, repetition_penalty=1.3)
    sampler.start(SlotStart(0, params, ids, rng.random(count + 1) < 0.5, MODES, 0))
    logits = logits_of(count, vocab)
    whole = sampler.score(logits, 0, 0, ids[1:])
    assert whole.isfinite().all()
    for first, last in ((0, 3), (510, 515), (1023, 1026), (1097, 1100)):
        part = sampler.score(logits[first:last], 0, first, ids[first + 1 : last + 1])
        torch.testing.assert_close(part, whole[:, first:last], rtol=1e-6, atol=1e-6)


def test_a_score_of_rows_that_are_not_finite_is_nan_there_only() -> None:
    logits = logits_of(4)
    logits[1, 0], logits[2, 0] = float("-inf"), float("nan")
    scores = sampler_of([LAWS["hot"]]).score(logits, 0, 0, np.array([1, 2, 3, 4], np.int32))
    assert scores.isnan().all(0).tolist() == [False, True, True, False]
    assert scores[:, [0, 3]].isfinite().all()


def test_scoring_leaves_the_slots_state_alone() -> None:
    logits = logits_of(3)
    scored, fresh = sampler_of([LAWS["all"]]), sampler_of([LAWS["all"]])
    scored.score(logits, 0, 0, np.array([1, 2, -1], np.int32))
    for length in (7, 8, 9):
        one, other = step(scored, logits[:1], [0], length), step(fresh, logits[:1], [0], length)
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.logprobs, other.logprobs)


# --- nothing reads the device ---


def test_every_law_runs_on_the_meta_device() -> None:
    """Boolean indexing, `.item()`, `nonzero` and copies to the host raise there."""
    meta = torch.device("meta")
    sampler = Sampler(VOCAB, len(EVERY), meta)
    for slot, params in enumerate(EVERY.values()):
        sampler.start(SlotStart(slot, params, PROMPT, SAMPLED, MODES, 4))
    slots = np.arange(len(EVERY), dtype=np.int32)
    out = sampler.sample(torch.empty(len(EVERY), VOCAB, device=meta), slots, slots)
    assert out.token_ids.shape == (len(EVERY),)
    assert out.logprobs.shape == (3, len(EVERY))
    for slot in range(len(EVERY)):
        scores = sampler.score(torch.empty(3, VOCAB, device=meta), slot, 0, np.array([1, 2, -1], np.int32))
        assert scores.shape == (3, 3)

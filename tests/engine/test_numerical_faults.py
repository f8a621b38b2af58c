"""Logits that overflow end their own request with a typed failure (docs/sampling.md) and harm no other."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.real import Real, ask, prompt, same, whole
from tests.rigs import script, write_table

VOCAB = 64
STEPS = [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 1)]


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain 1, 2, 3, 4, 5, 6, 1 ...; the logits after 40, which comes after 39, hold an infinity; after 41 a -inf."""
    rows, state_of = script(VOCAB, [*STEPS, (38, 39), (39, 40), (40, 7), (41, 7)])
    rows = rows.astype(np.float64)
    rows[state_of[40], 9], rows[state_of[41], 9] = 1e39, -1e39
    return write_table(tmp_path_factory.mktemp("overflowing"), rows, state_of)


LAWS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_p": 0.9},
    {"top_k": 4, "frequency_penalty": 0.1, "allowed_ids": (0, 7, 9, 39, 40)},
]


@pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True}, {"lazy": True}], ids=str)
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_row_that_overflows_fails_alone(overflowing: Path, law: dict[str, Any], options: dict[str, Any]) -> None:
    neighbours = [ask(f"n{i}", [1 + i], 12, temperature=0.3 * i, seed=i, frequency_penalty=0.01) for i in range(3)]
    expected = Real(overflowing, **options).run(*neighbours)
    engine = Real(overflowing, **options)
    bad = [ask("late", [38], 9, seed=1, **law), ask("at once", [5, 40], 9, **law), ask("minus", [41], 9, **law)]
    *done, late, at_once, minus = engine.run(*neighbours, *bad)
    for found, wanted in zip(done, expected, strict=True):
        same(whole(found, 12), wanted, atol=1e-6)
    for failed, tokens in ((late, [39, 40]), (at_once, []), (minus, [])):
        assert failed.finish_reason == "error"
        assert failed.error is not None
        assert failed.error.code == "numerical_error"
        # What was sampled before the fault is still there; nothing was after it.
        assert failed.token_ids.tolist() == tokens
        assert np.isfinite(failed.logprobs["processed"]).all()
    assert engine.engine.stats().nonfinite_total == 3
    engine.check_idle()


def test_a_prompt_that_overflows_where_it_is_scored_fails(overflowing: Path) -> None:
    engine = Real(overflowing)
    bad, good = engine.run(
        ask("bad", [1, 2, 40, 3], 2, prompt_logprobs=True), ask("good", [1, 2, 3, 4], 2, prompt_logprobs=True)
    )
    assert bad.error is not None
    assert bad.error.code == "numerical_error"
    whole(good, 2)
    # Where nobody looks at it, an overflow in the middle of a prompt is none of the sampler's business.
    whole(engine.run(ask("unscored", [1, 2, 40, 3], 2))[0], 2)
    engine.check_idle()


def test_blocks_of_a_failed_request_are_not_hit_by_others(overflowing: Path) -> None:
    engine = Real(overflowing)
    ids = [*prompt(1, 40, 6), 40]
    (failed,) = engine.run(ask("failed", ids, 4))
    assert failed.error is not None
    (after,) = engine.run(ask("after", [*ids[:-1], 1], 4, temperature=0))
    assert whole(after, 4).token_ids.tolist() == [2, 3, 4, 5]
    assert after.cached_tokens == 0
    engine.check_idle()

"""Field reports on how a request ends, on the real engine. Tests carry their reports' numbers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import PromptTooLong, RequestError, RequestTooLarge
from engine.model.config import read_model_config
from engine.request import Completion, Request, StopRule
from tests.engine.real import Real, ask, prompt, same, whole
from tests.rigs import RandModel, script, write_rand, write_table

# --- 13: every EOS of the checkpoint ends a reply ---

REAL_VOCAB, EOT, EOS = 151_936, 151_643, 151_645
CHAIN = [(9, 26_194), (26_194, 13), (13, EOT), (EOT, 33_975), (33_975, EOS), (EOS, 9)]


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After id 9 come 26194, 13, 151643, 33975, 151645, and 9 again."""
    rows, state_of = script(REAL_VOCAB, CHAIN)
    both = {"eos_token_id": [EOS, EOT], "pad_token_id": EOT, "temperature": 0.6}
    return write_table(tmp_path_factory.mktemp("chained"), rows, state_of, eos=EOS, generation_config=both)


def with_files(source: Path, target: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    """The same weights under another config.json (changed keys; None leaves one out) and generation_config.json."""
    target.mkdir()
    (target / "model.safetensors").symlink_to(source / "model.safetensors")
    raw = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    if generation is not None:
        (target / "generation_config.json").write_text(json.dumps(generation))
    return target


@pytest.mark.parametrize(
    ("config", "generation", "eos_ids", "reply"),
    [
        ({}, {"eos_token_id": [EOS, EOT]}, {EOS, EOT}, [26_194, 13, EOT]),
        ({}, {"eos_token_id": EOT}, {EOT}, [26_194, 13, EOT]),
        ({}, {"eos_token_id": EOS}, {EOS}, [26_194, 13, EOT, 33_975, EOS]),
        ({}, {"temperature": 0.6}, {EOS}, [26_194, 13, EOT, 33_975, EOS]),
        ({}, None, {EOS}, [26_194, 13, EOT, 33_975, EOS]),
        ({"eos_token_id": [EOT, EOS]}, None, {EOS, EOT}, [26_194, 13, EOT]),
        ({"eos_token_id": None}, {"eos_token_id": [EOT]}, {EOT}, [26_194, 13, EOT]),
    ],
    ids=["list", "other scalar", "same scalar", "no eos in the file", "no file", "list in config", "only in the file"],
)
def test_report_13_the_eos_list_ends_a_reply(
    chained: Path, tmp_path: Path, config: Any, generation: Any, eos_ids: set[int], reply: list[int]
) -> None:
    path = with_files(chained, tmp_path / "model", config, generation)
    assert set(read_model_config(path).eos_ids) == eos_ids
    engine = Real(path, max_running=1, max_step_tokens=16, max_context=32)
    stop = StopRule(ids=frozenset(engine.loaded.model_config.eos_ids))
    (done,) = engine.run(ask("a", [9], 8, temperature=0, stop=stop))
    assert whole(done).token_ids.tolist() == reply
    assert (done.finish_reason, done.stop) == ("stop", reply[-1])


def test_report_13_stop_ids_add_up_and_can_be_ignored(chained: Path) -> None:
    engine = Real(chained, max_running=4, max_step_tokens=16, max_context=32)
    eos = frozenset(engine.loaded.model_config.eos_ids)
    added, last, ignored, prompted = engine.run(
        ask("added", [9], 8, temperature=0, stop=StopRule(ids=eos | {13})),
        ask("last", [9], 3, temperature=0, stop=StopRule(ids=eos)),
        ask("ignored", [9], 8, temperature=0),
        ask("prompted", [EOT, EOS, 9], 2, temperature=0, stop=StopRule(ids=eos)),
    )
    assert (whole(added).token_ids.tolist(), added.finish_reason, added.stop) == ([26_194, 13], "stop", 13)
    # On the last token of the budget a stop is still a stop.
    assert (whole(last, 3).finish_reason, last.stop) == ("stop", EOT)
    assert whole(ignored).token_ids.tolist() == [26_194, 13, EOT, 33_975, EOS, 9, 26_194, 13]
    assert (ignored.finish_reason, ignored.stop) == ("length", None)
    assert (whole(prompted, 2).finish_reason, prompted.stop) == ("length", None)
    engine.check_idle()


# --- 14: stop strings over token boundaries ---

# id 1 'Hel', 2 'lo S', 3 'TO', 4 'P now', 5 'x' follow one another; 6, 7 are the halves of an e with an acute.
PIECES = [b"", b"Hel", b"lo S", b"TO", b"P now", b"x", b"\xc3", b"\xa9", b"caf"]
SPELL = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 8), (8, 6), (6, 7), (7, 1)]


@pytest.fixture(scope="module")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("spelling"), *script(16, SPELL))


def spell(path: Path, *stops: str, max_tokens: int = 8, start: list[int] | None = None, **options: Any) -> Completion:
    pieces = PIECES + [b""] * (16 - len(PIECES))
    engine = Real(path, max_running=2, max_step_tokens=16, max_context=32, token_bytes=pieces, **options)
    rule = StopRule(strings=tuple(stop.encode() for stop in stops))
    (done,) = engine.run(ask("a", start or [0], max_tokens, temperature=0, stop=rule))
    engine.check_idle()
    return whole(done)


def text(done: Completion) -> str:
    return b"".join(PIECES[i] for i in done.token_ids).decode()


@pytest.mark.parametrize("options", [{"overlap": False}, {"overlap": True}, {"lazy": True}], ids=str)
@pytest.mark.parametrize(
    ("stops", "ids", "found"),
    [
        (("STOP",), [1, 2, 3, 4], "STOP"),
        (("ll",), [1, 2], "ll"),
        (("el",), [1], "el"),
        (("llo",), [1, 2], "llo"),
        (("P now", "STO"), [1, 2, 3], "STO"),
        (("now", "P"), [1, 2, 3, 4], "P"),
        (("é",), [1, 2, 3, 4, 5, 8, 6, 7], "é"),
        (("STOP!", "TOPX", "SSTOP"), [1, 2, 3, 4, 5, 8, 6, 7], None),
    ],
    ids=str,
)
def test_report_14_stop_strings(
    spelling: Path, stops: tuple[str, ...], ids: list[int], found: str | None, options: dict[str, Any]
) -> None:
    done = spell(spelling, *stops, **options)
    assert done.token_ids.tolist() == ids
    if found is None:
        assert (done.finish_reason, done.stop) == ("length", None)
    else:
        assert (done.finish_reason, done.stop) == ("stop", found.encode())
        assert found in text(done)


def test_report_14_of_two_stops_that_end_together_one_is_named(spelling: Path) -> None:
    done = spell(spelling, "x", "OP nowx")
    assert done.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert done.stop in (b"x", b"OP nowx")


def test_report_14_a_stop_on_the_last_token_of_the_budget_is_a_stop(spelling: Path) -> None:
    assert spell(spelling, "STOP", max_tokens=4).finish_reason == "stop"
    cut = spell(spelling, "STOP", max_tokens=3)
    assert (cut.finish_reason, cut.token_ids.tolist()) == ("length", [1, 2, 3])


def test_report_14_the_prompt_never_stops_a_reply(spelling: Path) -> None:
    assert spell(spelling, "STOP", start=[1, 2, 3, 4, 0]).token_ids.tolist() == [1, 2, 3, 4]
    # 'STO' in the prompt and 'P' in the reply are no match.
    assert spell(spelling, "STOP", start=[1, 2, 3]).token_ids.tolist()[:2] == [4, 5]


def test_report_14_bad_stop_strings_are_refused(spelling: Path) -> None:
    engine = Real(spelling, token_bytes=PIECES + [b""] * 7)
    for strings in ((b"",), (b"ok", b"")):
        with pytest.raises(RequestError) as refusal:
            engine.engine.add(ask("a", [0], stop=StopRule(strings=strings)))
        assert refusal.value.field == "stop"
    engine.check_idle()


# --- 16: lengths at the limits ---


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("random") / "model", RandModel(seed=4))


OUTCOMES: dict[tuple[int, int], tuple[int, str] | type[Exception]] = {
    (1, 1): (1, "length"),
    (1, 2): (2, "length"),
    (1, 63): (63, "length"),
    (1, 10**9): (63, "context_overflow"),
    (62, 2): (2, "length"),
    (63, 1): (1, "length"),
    (63, 2): (1, "context_overflow"),
    (63, 10**9): (1, "context_overflow"),
    (0, 1): RequestError,
    (1, 0): RequestError,
    (1, -1): RequestError,
    (63, 0): RequestError,
    (64, 1): PromptTooLong,
    (65, 1): PromptTooLong,
    (1000, 2): PromptTooLong,
    (0, 0): RequestError,
    (1000, -1): RequestError,
}


@pytest.mark.parametrize("lazy", [False, True])
def test_report_16_lengths_at_the_limit_concern_their_own_request_only(random: Path, lazy: bool) -> None:
    healthy = ask("healthy", prompt(1, 5), 58, temperature=0)
    options = {"max_context": 64, "max_step_tokens": 64, "lazy": lazy}
    alone = Real(random, **options).run(healthy)[0]
    engine = Real(random, **options)
    engine.engine.add(healthy)
    for (length, budget), outcome in OUTCOMES.items():
        engine.step()
        request = ask(f"{length}+{budget}", prompt(length, length), budget, temperature=0)
        if isinstance(outcome, type):
            with pytest.raises(outcome) as refusal:
                engine.engine.add(request)
            assert getattr(refusal.value, "field") in ("token_ids", "max_tokens")  # noqa: B009
        else:
            engine.engine.add(request)
    while engine.engine.has_work:
        engine.step()
    for (length, budget), outcome in OUTCOMES.items():
        if isinstance(outcome, tuple):
            done = engine.ended[f"{length}+{budget}"]
            assert (len(whole(done).token_ids), done.finish_reason) == outcome
    same(engine.ended["healthy"], alone)
    assert len(engine.ended["healthy"].token_ids) == 58
    engine.check_idle()


@pytest.mark.parametrize(("length", "fits"), [(1, True), (63, True), (64, True), (65, False)])
def test_report_16_a_score_needs_no_room_for_a_token(random: Path, length: int, fits: bool) -> None:
    engine = Real(random, max_context=64, max_step_tokens=64)
    request = ask("score", prompt(2, length), 0, prompt_logprobs=True)
    if not fits:
        with pytest.raises(PromptTooLong):
            engine.engine.add(request)
        return
    (done,) = engine.run(request)
    assert len(whole(done, 0).token_ids) == 0
    assert done.prompt_logprobs is not None
    scores = done.prompt_logprobs["processed"]
    assert len(scores) == length
    assert np.isnan(scores[0])
    assert np.isfinite(scores[1:]).all()
    engine.check_idle()


def test_report_16_what_can_never_fit_in_the_pool_is_refused_and_what_just_fits_runs(random: Path) -> None:
    """4 blocks hold the KV of 64 positions; the last sampled token needs none."""
    engine = Real(random, num_blocks=5, max_context=256, max_step_tokens=64)

    def fill(name: str, budget: int) -> Request:
        return ask(name, prompt(3, 40), budget, temperature=0)

    (done,) = engine.run(fill("fits", 25))
    assert whole(done, 25).finish_reason == "length"
    with pytest.raises(RequestTooLarge):
        engine.engine.add(fill("one more", 26))
    engine.check_idle()

"""textarena behind a trajectory: three games played to their ends, the same game for the same config."""

from __future__ import annotations

import dataclasses
import random
import re
from typing import Any

import pytest

from protocols.fields import Template
from rollout.chat.conversation import Conversation
from tests.rollout.chat.tiny import chat
from tests.rollout.environments.adapters.play import play, text
from tests.rollout.environments.build import context

pytest.importorskip("textarena")

from rollout.environments.adapters.textarena import Game, TextArena, messages

GUESS = {"game": "GuessTheNumber-v0", "seed": 3}
SUDOKU = {"game": "Sudoku-v0-easy", "seed": 1}
FOUR = {"game": "ConnectFour-v0", "seed": 0}


def bisect(story: str) -> str:
    low, high = 1, 20
    for guess, hint in re.findall(
        r"assistant\n(?:<think>[^<]*</think>)?\[(\d+)\].*?The target number is (\w+)", story, re.DOTALL
    ):
        low, high = (low, int(guess) - 1) if hint == "lower" else (int(guess) + 1, high)
    return f"[{(low + high) // 2}]"


def test_a_number_is_found_by_halves_and_every_turn_extends_the_last() -> None:
    record = play(TextArena, GUESS, messages(GUESS), bisect)
    assert (record.status, record.finish_reason, record.error) == ("completed", "env_done", None)
    assert (record.reward, record.rewards) == (1.0, {"invalid": 0.0})
    assert 1 <= len(record.segments[0].turns) <= 5
    assert len(record.segments) == 1
    story = text(record)
    assert story.count("You are playing Guess The Number") == 1, "nothing is told twice"


def test_it_runs_in_a_process() -> None:
    record = play(TextArena, GUESS, messages(GUESS), bisect, isolated=True)
    assert (record.reward, record.error) == (1.0, None)


def test_a_move_against_the_rules_twice_loses() -> None:
    record = play(TextArena, GUESS, messages(GUESS), ["[99]", "nothing"])
    assert (record.finish_reason, record.rewards) == ("env_done", {"invalid": 1.0})
    assert "You attempted an invalid move" in text(record)


def test_reasoning_is_no_move() -> None:
    record = play(TextArena, GUESS, messages(GUESS), lambda story: f"<think>[1] or [2]</think>{bisect(story)}")
    assert (record.reward, record.rewards) == (1.0, {"invalid": 0.0})


def test_a_game_that_did_not_end_has_no_reward() -> None:
    record = play(TextArena, GUESS, messages(GUESS), ["[1]"], budget={"max_turns": 1})
    assert (record.finish_reason, record.reward, record.rewards) == ("max_turns", None, {})


def test_a_sudoku_is_solved() -> None:
    game = Game(SUDOKU)
    full, board = game._inner.full_grid, game._inner.game_board
    moves = [f"[{r + 1} {c + 1} {full[r][c]}]" for r in range(9) for c in range(9) if board[r][c] == 0]
    assert moves
    record = play(TextArena, SUDOKU, messages(SUDOKU), moves)
    assert (record.reward, record.finish_reason) == (1.0, "env_done"), record.error
    assert len(record.segments[0].turns) == len(moves)


def test_connect_four_is_played_against_an_opponent_who_is_the_same_for_the_same_sample() -> None:
    def column(story: str) -> str:
        return f"[col {story.count('assistant') % 7}]"

    stories = [
        text(play(TextArena, FOUR, messages(FOUR), column, seed=seed, sample_index=sample))
        for seed, sample in ((7, 0), (7, 0), (7, 1), (8, 0))
    ]
    assert stories[0] == stories[1]
    assert len(set(stories)) == 3
    assert "Player 1 dropped their disk (O)" in stories[0]


def test_a_config_is_one_game_whatever_else_draws_numbers() -> None:
    first = [message["content"] for message in messages(SUDOKU)]
    state = random.getstate()
    assert [message["content"] for message in messages(SUDOKU)] == first
    assert random.getstate() == state, "the process's own generator is as it was"
    assert [message["content"] for message in messages({**SUDOKU, "seed": 2})] != first
    hidden = {Game({**GUESS, "seed": seed})._inner.game_number for seed in range(12)}
    assert len(hidden) > 4


@pytest.mark.parametrize(
    ("config", "complaint"),
    [({"game": "Nothing-v0"}, "Nothing-v0"), ({"seed": 1.5}, "config.seed"), ({"level": 1}, "config.level is unknown")],
)
def test_a_config_that_means_nothing_is_refused_by_name(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        messages(config)


def test_a_game_goes_on_from_what_was_played() -> None:
    form, asked = chat().form((), {}), messages(FOUR)
    talk = Conversation(form, asked, Template())
    there = dataclasses.replace(context(), chat=talk, config=FOUR, seed=5)
    first, second = TextArena(), TextArena()
    first.reset(there)
    for column in (3, 3, 2):
        first._play(f"[col {column}]")
    second.restore(there, first.snapshot())
    assert second._game._inner.state.game_state == first._game._inner.state.game_state
    assert second._play("[col 6]") == first._play("[col 6]")

"""Three games of textarena, played to their ends or four turns long: python -m examples.environments.games"""

from __future__ import annotations

import sys

from examples.environments.play import play
from rollout.environments.adapters.textarena import messages

GAMES = ("GuessTheNumber-v0", "ConnectFour-v0", "Sudoku-v0-easy")

if __name__ == "__main__":
    sys.exit(
        play(
            "rollout.environments.adapters.textarena:TextArena",
            messages,
            [{"game": game, "seed": 3} for game in GAMES],
            "textarena",
            max_tokens=24,
            max_turns=4,
            on_length="continue",  # a move that is cut is a move
        )
    )

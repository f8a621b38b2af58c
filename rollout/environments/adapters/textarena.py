"""`textarena`: text games over several turns. GuessTheNumber, Sudoku and ConnectFour need no network.

    --env textarena=rollout.environments.adapters.textarena:TextArena

    config = {"game": "GuessTheNumber-v0", "seed": 3}
    client.group(messages=messages(config), environment="textarena", config=config, n=8, max_turns=20)

Needs the extra `textarena`, where the worker runs and where `messages` is called.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from protocols.fields import Record
from rollout.environments.adapters.config import conversation, generator, known, option
from rollout.environments.base import Context, Environment, Rewards, Step, TurnResult
from rollout.tools.parse import read

OPTIONS = ("game", "seed", "system")
_RANDOM = threading.Lock()
"""Games draw from Python's one generator, which the games of a process share."""


def messages(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the game says at its start. Raises ValueError for a config that means nothing."""
    system = option(config, "system", "")
    said = [{"role": "system", "content": system}] if system else []
    return [*said, {"role": "user", "content": Game(config).opening}]


class Game:
    """One game, played by us as player 0. config: game (textarena's name of it), seed (of the game: the hidden number,
    the puzzle), system. opening: what it says at its start, the same for the same config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        known(config, OPTIONS)
        name, seed = option(config, "game", "GuessTheNumber-v0"), option(config, "seed", 0)
        opponent = OPPONENTS.get(name.partition("-")[0])
        with self._drawing(random.Random(seed).getstate()):
            # The import draws too.
            import textarena

            try:
                self._env = textarena.make(name)
            except (ValueError, KeyError) as error:
                raise ValueError(f"config.game {name!r}: {error}") from error
            self._env.reset(num_players=1 if opponent is None else 2, seed=seed)
        self._inner = self._env
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env  # a wrapper would tell the whole story again at each turn
        self._opponent = opponent
        self.opening = self._news()

    def play(self, action: str, generator: random.Random) -> str | None:
        """What is new after it, the opponent's moves included; None: the game is over."""
        with self._drawing(self._state):
            done, _ = self._env.step(action)
            while not done and self._inner.state.current_player_id != 0 and self._opponent is not None:
                self._inner.get_observation()  # is not for us
                done, _ = self._env.step(self._opponent(self._inner.state.game_state, generator))
        return None if done else self._news()

    @property
    def reward(self) -> float | None:
        """The game's own; None while it goes on."""
        rewards = self._inner.state.rewards
        return None if rewards is None else float(rewards[0])

    @property
    def invalid(self) -> bool:
        """It was lost by a move against the rules."""
        return bool(self._inner.state.game_info[0].get("invalid_move"))

    def _news(self) -> str:
        _, heard = self._inner.get_observation()
        # Our own moves are in the conversation already.
        return "\n".join(message for sender, message, _ in heard if sender != 0)

    @contextmanager
    def _drawing(self, state: Any) -> Iterator[None]:
        """This game's random numbers, whatever other games of this process do."""
        with _RANDOM:
            before = random.getstate()
            random.setstate(state)
            try:
                yield
            finally:
                self._state = random.getstate()
                random.setstate(before)


def random_column(state: Mapping[str, Any], generator: random.Random) -> str:
    """Of Connect Four: any column that is not full."""
    return f"[col {generator.choice([i for i, cell in enumerate(state['board'][0]) if cell == '.'])}]"


OPPONENTS: Mapping[str, Callable[[Mapping[str, Any], random.Random], str]] = {"ConnectFour": random_column}
"""Player 1 of games for two."""


class TextArena(Environment):
    """Reward: the game's, from -1 or 0 to 1; None where it did not come to its end. Part `invalid`: lost by a move
    against the rules. What a turn says after its reasoning is the move."""

    isolation: ClassVar = "process"
    chat_roles: ClassVar = ("user",)

    def reset(self, context: Context) -> None:
        self._chat = conversation(context)
        self._generator = generator(context)
        self._game = Game(context.config)
        self._played: list[str] = []

    def snapshot(self) -> dict[str, Any]:
        return {"played": self._played}

    def restore(self, context: Context, state: Mapping[str, Any]) -> None:
        """The same game, played again up to here."""
        self.reset(context)
        for said in state["played"]:
            self._play(said)

    def step(self, turn: TurnResult) -> Awaitable[Step]:
        said = read(self._chat.text(turn), thinking=self._chat.form.opens_reasoning()).content
        news = self._play(said)
        if news is None:
            return self._chat.follow(turn)
        return self._chat.follow(turn, {"role": "user", "content": news})

    def _play(self, said: str) -> str | None:
        self._played.append(said)
        return self._game.play(said, self._generator)

    def finish(self, record: Record) -> Rewards:  # noqa: ARG002
        reward = self._game.reward
        return Rewards(reward, {} if reward is None else {"invalid": float(self._game.invalid)})

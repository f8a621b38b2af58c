"""Who is next: whoever holds least, and nobody twice before everybody once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from rollout.environments.line import Line, Owner, Place


def in_line(test: Callable[[Line[int]], None]) -> None:
    async def body() -> None:
        test(Line())

    asyncio.run(body())


def served(line: Line[int]) -> str:
    place = line.first()
    assert place is not None
    line.take(place)
    return f"{place.owner.session}{place.owner.trajectory}"


def test_the_first_calls_of_all_go_before_the_second_call_of_one() -> None:
    def test(line: Line[int]) -> None:
        for name in ("1", "1", "1", "2", "2", "3"):
            line.join(Owner("a", trajectory=name))
        assert [served(line) for _ in range(6)] == ["a1", "a2", "a3", "a1", "a2", "a1"]
        assert line.first() is None
        assert len(line) == 0

    in_line(test)


def test_who_comes_again_is_behind_those_that_came_meanwhile() -> None:
    def test(line: Line[int]) -> None:
        line.join(Owner("a", trajectory="1"))
        assert served(line) == "a1"
        for name in ("2", "1", "3"):
            line.join(Owner("a", trajectory=name))
        line.give_back(Owner("a", trajectory="1"))
        assert [served(line) for _ in range(3)] == ["a2", "a1", "a3"]

    in_line(test)


def test_a_session_that_holds_less_goes_first_however_long_the_other_waits() -> None:
    def test(line: Line[int]) -> None:
        for i in range(4):
            line.join(Owner("a", trajectory=str(i)))
        assert [served(line) for _ in range(2)] == ["a0", "a1"]
        line.join(Owner("b", trajectory="0"))
        line.join(Owner("b", trajectory="1"))
        assert [served(line) for _ in range(4)] == ["b0", "b1", "a2", "a3"]
        line.give_back(Owner("b", trajectory="0"))
        line.join(Owner("a", trajectory="4"))
        line.join(Owner("b", trajectory="0"))
        assert served(line) == "b0"

    in_line(test)


def test_a_batch_that_holds_less_goes_before_another_of_the_same_session() -> None:
    def test(line: Line[int]) -> None:
        for i in range(4):
            line.join(Owner("a", "train", str(i)))
        assert [served(line) for _ in range(2)] == ["a0", "a1"]
        line.join(Owner("a", "eval", "e"))
        line.join(Owner("a", "eval", "f"))
        assert [served(line) for _ in range(4)] == ["ae", "af", "a2", "a3"]

    in_line(test)


def test_whoever_gives_back_is_as_good_as_new() -> None:
    def test(line: Line[int]) -> None:
        for _ in range(2):
            line.join(Owner("a", trajectory="1"))
        assert served(line) == "a1"
        line.join(Owner("a", trajectory="2"))
        line.give_back(Owner("a", trajectory="1"))
        assert served(line) == "a1", "it came first"
        assert served(line) == "a2"
        assert line.holds("a") == 2
        assert line.holds("b") == 0

    in_line(test)


def test_leaving_twice_is_leaving_once_and_nothing_is_remembered_of_who_is_gone() -> None:
    def test(line: Line[int]) -> None:
        places: list[Place[int]] = [line.join(Owner("a", trajectory="1")) for _ in range(2)]
        line.leave(places[0])
        line.leave(places[0])
        assert len(line) == 1
        line.take(places[1])
        line.leave(places[1])
        assert len(line) == 0
        line.give_back(Owner("a", trajectory="1"))
        assert not line._all.parts

    in_line(test)


def test_nobody_is_forgotten_whatever_they_do() -> None:
    def test(line: Line[int]) -> None:
        choice = random.Random(1)
        waiting: list[Place[int]] = []
        holding: list[Owner] = []
        for _ in range(5000):
            match choice.randrange(4):
                case 0:
                    waiting.append(line.join(Owner(choice.choice("ab"), choice.choice("xy"), choice.choice("123"))))
                case 1 if waiting:
                    line.leave(waiting.pop(choice.randrange(len(waiting))))
                case 2 if (first := line.first()) is not None:
                    held = Counter(owner.session for owner in holding)
                    assert all(held[first.owner.session] <= held[place.owner.session] for place in waiting)
                    mine = first.owner
                    of_batch = Counter(owner.batch for owner in holding if owner.session == mine.session)
                    beside = [place.owner.batch for place in waiting if place.owner.session == mine.session]
                    assert all(of_batch[mine.batch] <= of_batch[batch] for batch in beside)
                    waiting.remove(first)
                    line.take(first)
                    holding.append(first.owner)
                case 3 if holding:
                    line.give_back(holding.pop(choice.randrange(len(holding))))
            assert len(line) == len(waiting)
            assert (line.first() is None) == (not waiting)
        for place in waiting:
            line.leave(place)
        for owner in holding:
            line.give_back(owner)
        assert not line._all.parts

    in_line(test)

"""docs/environments.md: its examples run, and its table of endings is the one in the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from protocols.fields import STATUS_OF
from rollout.async_engine import AsyncEngine
from rollout.rollout import Rollout
from rollout.tokenizer import Tokenizer
from tests.rollout.build import MODEL, group, run, spec
from tests.rollout.stub_engine import StubEngine, completed
from tests.rollout.test_tokenizer import byte_level

TEXT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def example(name: str) -> Any:
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"class {name}(" in block)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace[name]


@pytest.mark.parametrize(
    ("guesses", "answers", "reward"), [((5,), [], 1.0), ((1, 7, 5), [8, 9], 1.0), ((7, 6, 4), [9, 9], 0.0)]
)
def test_the_guessing_game(guesses: tuple[int, ...], answers: list[int], reward: float) -> None:
    assert example("Guess").on_length == "continue"  # a guess of one token is cut by max_tokens

    async def main() -> Any:
        said = iter(guesses)
        engine = AsyncEngine(StubEngine(lambda request: completed(request, (next(said), 2))))
        await engine.start()
        played = group(metadata={"hidden": 5})
        rollout = Rollout(spec(played), engine=engine, environment=example("Guess"), model=MODEL, on_turn=print)
        return await rollout.run()

    record = run(main())
    assert (record.finish_reason, record.reward, len(record.segments[0].turns)) == ("env_done", reward, len(guesses))
    context = record.segments[0].token_ids[record.segments[0].source == 3]
    assert context.tolist() == answers


def test_the_tool_whose_output_cannot_end_the_turn() -> None:
    tokenizer = Tokenizer(byte_level().to_str().encode())
    end = tokenizer.special("<|im_end|>")
    said = [*tokenizer.encode("hello <|im_end|>").tolist(), end]

    async def main() -> Any:
        engine = AsyncEngine(StubEngine(lambda request: completed(request, said)))
        await engine.start()
        model = MODEL.model_copy(update={"max_context": 4096})
        rollout = Rollout(
            spec(group(budget={"max_turns": 2})),
            engine=engine,
            environment=example("Shout"),
            model=model,
            on_turn=print,
            tokenizer=tokenizer,
        )
        return await rollout.run()

    record = run(main())
    assert record.finish_reason == "max_turns", record.error
    ids = record.segments[0].token_ids[3:]
    assert tokenizer.decode(ids) == (
        "hello <|im_end|><|im_end|><|im_start|>user\nHELLO <|IM_END|><|im_end|>\n<|im_start|>assistant\n"
        "hello <|im_end|><|im_end|>"
    )
    assert (ids == end).sum() == 3


def test_the_table_of_endings_is_the_codes() -> None:
    table: dict[str, str] = {}
    for names, status in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w+) \|", TEXT, re.MULTILINE):
        table |= dict.fromkeys(re.findall(r"`(\w+)`", names), status)
    assert {name: status for name, status in table.items() if name in STATUS_OF} == STATUS_OF

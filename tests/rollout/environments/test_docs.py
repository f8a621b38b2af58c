"""docs/environments.md: its examples run, and its table of endings is the one in the code."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from protocols.fields import STATUS_OF
from rollout.chat.tokenizer import Tokenizer
from rollout.environments.answer import Answer, End
from rollout.generation.async_engine import AsyncEngine
from rollout.trajectory.rollout import Rollout
from tests import rigs
from tests.rollout.build import MODEL, group, run, spec
from tests.rollout.chat import tiny
from tests.rollout.chat.test_tokenizer import byte_level
from tests.rollout.environments.adapters.play import play, text
from tests.rollout.environments.build import TURN, context, guarded
from tests.rollout.stub_engine import StubEngine, completed
from tests.rollout.workers import WorkerProcess

TEXT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()


def block(what: str) -> str:
    """The page's Python that contains `what`."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if what in block)
    return str(code)


def example(name: str) -> Any:
    namespace: dict[str, Any] = {}
    exec(block(f"class {name}("), namespace)
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


def test_the_running_sum_goes_on_elsewhere() -> None:
    async def main() -> None:
        first, second = guarded(example("Running")), guarded(example("Running"))
        await first.open(context, ())
        assert first.resumable
        await first.step(TURN, ())
        kept = await first.kept(0, ())
        assert not isinstance(kept, End)
        assert await second.reopen(context, dict(kept[0] or {}), ()) is None
        for guard in (first, second):
            answer = await guard.step(TURN, ())
            assert isinstance(answer, Answer)
            assert answer.observation is not None
            assert answer.observation.tolist() == [30 % 10]

    run(main())


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that can be talked to."""
    source = tmp_path_factory.mktemp("talking") / "weights"
    checkpoint = rigs.write_rand(source, rigs.RandModel(seed=3, max_context=4096))
    (checkpoint / "tokenizer.json").write_text(tiny.ordinary().to_str())
    (checkpoint / "chat_template.jinja").write_text(tiny.PLAIN)
    return checkpoint


def module(folder: Path) -> Path:
    (folder / "sums.py").write_text(block("class Sum("))
    return folder


def test_from_nothing_to_an_environment_of_ones_own(talking: Path, tmp_path: Path) -> None:
    worker = WorkerProcess(
        "rollout",
        *("--weights", str(talking), "--kv-tokens", "8192", "--env", "sum=sums:Sum"),
        *("--env", "reasoning=rollout.environments.adapters.reasoning_gym:ReasoningGym"),
        folder=module(tmp_path),
        elsewhere=True,
    )
    try:
        address = worker.wait_ready(120).address
        lines = trainer('environment="sum"', address)
        assert len(lines) == 16
        assert {line.split()[1] for line in lines} <= {"completed", "truncated"}
        assert {line.split()[2] for line in lines} <= {"0.0", "1.0"}
        pytest.importorskip("reasoning_gym")
        lines = trainer('environment="reasoning"', address)
        assert len(lines) == 8
        assert all("accuracy" in line for line in lines)
    finally:
        worker.kill()


def trainer(what: str, address: str) -> list[str]:
    """What the page's program with `what` in it prints."""
    printed = io.StringIO()
    code = block(what).replace("tcp://127.0.0.1:5555", address).replace("max_tokens=512", "max_tokens=16")
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    return printed.getvalue().splitlines()


@pytest.mark.parametrize(
    ("replies", "reward"), [(["5"], 1.0), (["4", "Oh, 5."], 1.0), (["1", "2", "3"], 0.0), (["6", "6", "5!"], 1.0)]
)
def test_the_sum(replies: list[str], reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(module(tmp_path))
    monkeypatch.delitem(sys.modules, "sums", raising=False)
    asked = [{"role": "user", "content": "What is 2 + 3?"}]
    factory = importlib.import_module("sums").Sum
    record = play(factory, {"a": 2, "b": 3}, asked, replies, isolated=len(replies) == 2)
    assert (record.finish_reason, record.reward, record.error) == ("env_done", reward, None)
    assert text(record).count("No. Try again.") == len(replies) - 1


def test_the_table_of_endings_is_the_codes() -> None:
    table: dict[str, str] = {}
    for names, status in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\w+) \|", TEXT, re.MULTILINE):
        table |= dict.fromkeys(re.findall(r"`(\w+)`", names), status)
    assert {name: status for name, status in table.items() if name in STATUS_OF} == STATUS_OF

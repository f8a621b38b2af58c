"""Calls of tools: whatever one does comes back as a text, and the next one finds nothing of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.environments.errors import NoProcess, NotImported
from rollout.environments.pool import Pool
from rollout.tools.parse import Call
from rollout.tools.run import Result, Runner
from rollout.tools.tool import Tool
from tests.rollout.build import run
from tests.rollout.elsewhere import say_from
from tests.rollout.tools import sample_tools


def called(*calls: tuple[Callable[..., Any], dict[str, Any]], **options: Any) -> list[Result]:
    """One after the other, in one process."""

    async def main() -> list[Result]:
        pool = Pool(1, "tools")
        tools = {tool.name: tool for tool in (Tool.of(function) for function, _ in calls)}
        runner = Runner(tools, limit=1000, pool=pool, **options)
        try:
            results = []
            for function, arguments in calls:
                results += await runner.run([Call(function.__name__, arguments)])
            return results
        finally:
            await pool.close()

    return run(main())


def test_the_next_call_is_where_the_first_one_was() -> None:
    moved, said = called((sample_tools.move, {}), (sample_tools.say, {}))
    assert said == Result("say", f"said in {moved.text}")


@pytest.mark.parametrize("what", ["descriptor", "file"])
def test_a_process_whose_streams_were_closed_is_not_used_again(what: str) -> None:
    closed, said = called((sample_tools.close_streams, {"what": what}), (sample_tools.say, {}))
    assert closed.text == "closed"
    assert said.text.startswith("said in ")


def test_a_plain_function_may_return_a_coroutine_and_a_generator() -> None:
    waited, counted = called((sample_tools.wrapped, {"seconds": 0.0}), (sample_tools.count, {}))
    assert waited == Result("wait_quietly", "waited")
    assert counted.text.startswith("[0, 1, 2, 3")
    assert "[cut: the first 1000 of" in counted.text


def test_of_a_death_the_model_reads_nothing_that_is_another_each_time() -> None:
    (died,) = called((sample_tools.fail, {"how": "die"}))
    assert died == Result("fail", "error: the tool did not return: killed by signal 9 (Killed)", "raised")


def test_of_a_death_the_model_reads_what_that_call_printed_and_no_other() -> None:
    """The calls before it in its process were those of other trajectories, and of other clients."""
    *_, died = called(
        (sample_tools.mutter, {"what": "a secret", "die": False}),
        (sample_tools.say, {}),
        (sample_tools.mutter, {"what": "a secret", "die": False}),
        (sample_tools.mutter, {"what": "last words", "die": True}),
    )
    said = "error: the tool did not return: killed by signal 9 (Killed); the end of its output: last words"
    assert died == Result("mutter", said, "raised")


def test_the_import_of_a_module_is_no_part_of_a_calls_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say = say_from(tmp_path, monkeypatch, "import time; time.sleep(1.5)")
    assert called((say, {}), (say, {}), deadline_s=1.0) == [Result("say", "said")] * 2


def test_a_module_that_no_process_can_import_is_no_tool_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = say_from(tmp_path, monkeypatch, "raise OSError('only one may')")
    with pytest.raises(NotImported, match="it cannot be imported in a process: OSError: only one may"):
        called((say, {}))
    say = say_from(tmp_path, monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(NoProcess, match=r"within 0\.5 s"):
        called((say, {}), wait_s=0.5)


@pytest.mark.parametrize("kind", ["def", "async def", "generator"])
def test_a_result_is_written_down_beside_the_loop_and_within_its_deadline(kind: str) -> None:
    """Its text is made by code of others: of a closure's, of a coroutine's, of a generator's result."""
    release = threading.Event()

    class Slow:
        def __str__(self) -> str:
            return "said" if release.wait(5) else "the loop was held up"

    def plain() -> Any:
        return Slow()

    async def later() -> Any:
        return Slow()

    def one_by_one() -> Any:
        yield str(Slow())

    function = {"def": plain, "async def": later, "generator": one_by_one}[kind]
    tools = {"f": Tool("f", "", {}, function)}

    async def main() -> tuple[Result, Result]:
        asyncio.get_running_loop().call_later(0.05, release.set)
        (said,) = await Runner(tools).run([Call("f", {})])
        release.clear()
        (late,) = await Runner(tools, deadline_s=0.1).run([Call("f", {})])
        release.set()
        return said, late

    said, late = run(main())
    assert "said" in said.text
    assert late == Result("f", "error: timeout: no result within 0.1 s", "timeout")


class Leaving:
    def __repr__(self) -> str:
        raise SystemExit(3)


async def leaving(raises: bool) -> Any:
    """Return what ends whoever prints it, or raise it."""
    if raises:
        raise ValueError(Leaving())
    return Leaving()


@pytest.mark.parametrize("raises", [False, True])
def test_a_result_that_would_end_the_loop_does_not(raises: bool) -> None:
    (result,) = called((leaving, {"raises": raises}))
    assert result.text == ("error: ValueError (it cannot be printed)" if raises else "<Leaving>")

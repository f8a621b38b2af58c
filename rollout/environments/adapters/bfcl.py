"""The multi-turn tool tasks of the Berkeley Function Calling Leaderboard: real APIs with state, several users' turns.

    --env bfcl=rollout.environments.adapters.bfcl:Bfcl

    config = {"category": "multi_turn_base", "index": 7}
    client.group(messages=messages(config), environment="bfcl", config=config, n=8, max_turns=40)

Needs `pip install --no-deps bfcl-eval` (its dependencies, a hundred, are for calling other models), where the worker
runs and where `messages` is called. Calls are in the Hermes / Qwen format, `<tool_call>{...}</tool_call>`.

Scored as the benchmark's own checker does: after each user's turn the state of every API has to equal that of the
reference calls, and what those returned has to be among what was returned so far.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, ClassVar

from protocols.fields import Record
from rollout.chat.follow import call_id
from rollout.environments.adapters.config import conversation, index, known, option
from rollout.environments.base import Context, Environment, Rewards, Step, TurnResult
from rollout.tools.parse import BadCall, Call, read

CATEGORIES = ("multi_turn_base", "multi_turn_miss_param", "multi_turn_long_context")
"""Of 200 tasks each. multi_turn_miss_func, where tools appear in the course of it, would rewrite the prompt."""
OPTIONS = ("category", "index", "system")
CALLS_PER_TURN = 20
"""Sampled turns that one user's turn may take: the benchmark's limit."""
DATA = "BFCL_v4_{}.json"
SCHEMA_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
FORBIDDEN = frozenset(("kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run"))
"""Names that the benchmark does not call."""

Methods = Mapping[str, Callable[..., Any]]


def messages(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """What the first user says. Raises ValueError for a config that means nothing."""
    system = option(config, "system", "")
    said = [{"role": "system", "content": system}] if system else []
    return [*said, *load(config)["question"][0]]


def load(config: Mapping[str, Any]) -> dict[str, Any]:
    """One task: question (messages of each user's turn), initial_config, involved_classes, ground_truth (calls)."""
    known(config, OPTIONS)
    category, at = option(config, "category", CATEGORIES[0]), index(config)
    if category not in CATEGORIES:
        raise ValueError(f"config.category must be one of {', '.join(CATEGORIES)}, not {category!r}")
    tasks, truths = _lines(DATA.format(category)), _lines("possible_answer", DATA.format(category))
    if at >= len(tasks):
        raise ValueError(f"config.index must be below {len(tasks)}, but is {at}")
    task: dict[str, Any] = json.loads(tasks[at])
    truth = json.loads(truths[at])
    if truth["id"] != task["id"]:
        raise ValueError(f"the data of bfcl-eval is not in order: {truth['id']} answers {task['id']}")
    return {**task, "ground_truth": truth["ground_truth"]}


def tools(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """JSON schemas of the functions of a task."""
    task = load(config)
    mapping = _module("constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    found = []
    for name in task["involved_classes"]:
        for line in _lines("multi_turn_func_doc", mapping[name]):
            doc = json.loads(line)
            if doc["name"] not in task.get("excluded_function", ()):
                told = {key: doc[key] for key in ("name", "description")}
                found.append({"type": "function", "function": {**told, "parameters": _schema(doc["parameters"])}})
    return found


class Bfcl(Environment):
    """Reward: 1 where every user's turn was right, else 0. Part `turns`: the share of users' turns before the first
    wrong one."""

    isolation: ClassVar = "process"
    chat_roles: ClassVar = ("tool", "user")

    @classmethod
    def tool_schemas(cls, config: Mapping[str, Any]) -> list[dict[str, Any]]:
        return tools(config)

    def reset(self, context: Context) -> None:
        self._chat = conversation(context)
        self._play = Play(load(context.config))
        self._done: list[list[Any] | None] = []

    def snapshot(self) -> dict[str, Any]:
        return {"done": self._done}

    def restore(self, context: Context, state: Mapping[str, Any]) -> None:
        """Everything that was called is called again."""
        self.reset(context)
        for calls in state["done"]:
            if calls is None:
                self._next_user()
            else:
                self._call(tuple(BadCall(said) if isinstance(said, str) else Call(*said) for said in calls))

    def step(self, turn: TurnResult) -> Awaitable[Step]:
        thinking = self._chat.form.opens_reasoning()
        said = read(self._chat.text(turn), complete=turn.finish_reason == "stop", thinking=thinking)
        if said.calls and self._play.may_call:
            results = self._call(said.calls)
            answers = [
                {"role": "tool", "name": name, "tool_call_id": call_id(i), "content": text}
                for i, (name, text) in enumerate(results)
            ]
            return self._chat.follow(turn, *answers, called=True)
        return self._chat.follow(turn, *self._next_user(), called=bool(said.calls))

    def _call(self, calls: tuple[Call | BadCall, ...]) -> list[tuple[str, str]]:
        self._done.append([c.problem if isinstance(c, BadCall) else [c.name, c.arguments] for c in calls])
        return self._play.call(calls)

    def _next_user(self) -> list[dict[str, str]]:
        self._done.append(None)
        return self._play.next_user()

    def finish(self, record: Record) -> Rewards:  # noqa: ARG002
        right = self._play.right
        return Rewards(float(right == self._play.turns), {"turns": right / self._play.turns})


class Play:
    """The APIs of a task, twice: one set for the model, one for the reference."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self._apis, self._reference = apis(task), apis(task)
        self._methods = methods(self._apis)
        self._references = methods(self._reference)
        self._returned: Counter[str] = Counter()
        self._turn = self._calls = self._steps = 0
        self._wrong = False
        self.turns = len(task["question"])
        self.right = 0

    @property
    def may_call(self) -> bool:
        return self._steps < CALLS_PER_TURN

    def call(self, calls: tuple[Call | BadCall, ...]) -> list[tuple[str, str]]:
        """Name and result of each, in order; an error is a result."""
        self._steps += 1
        results = []
        for call in calls:
            if isinstance(call, BadCall):
                results.append(("", f"Error during execution: {call.problem}"))
                continue
            text = _run(functools.partial(self._called, call))
            self._calls += 1
            self._returned[text] += 1
            results.append((call.name, text))
        return results

    def next_user(self) -> list[dict[str, str]]:
        """The model has nothing more to do for this user: judge that, and say what the next one says, if there is one.

        What follows a wrong turn cannot be right.
        """
        self._wrong = self._wrong or not self._is_right() or not self.may_call
        self.right += not self._wrong
        self._turn += 1
        self._calls = self._steps = 0
        if self._wrong or self._turn == self.turns:
            return []
        said: list[dict[str, str]] = self._task["question"][self._turn]
        return said

    def _is_right(self) -> bool:
        truth = self._task["ground_truth"][self._turn]
        expected = Counter(_run(functools.partial(eval, text, {}, dict(self._references))) for text in truth)
        if not truth:
            return self._calls == 0  # the user had not said enough
        return self._calls > 0 and self._same_state() and expected <= self._returned

    def _same_state(self) -> bool:
        return all(
            getattr(self._apis[name], attribute) == value
            for name, reference in self._reference.items()
            for attribute, value in vars(reference).items()
            if not attribute.startswith("_")
        )

    def _called(self, call: Call) -> Any:
        name = call.name
        if name in FORBIDDEN or name not in self._methods or name in self._task.get("excluded_function", ()):
            raise NameError(f"name '{name}' is not defined")
        return self._methods[name](**call.arguments)


def apis(task: Mapping[str, Any]) -> dict[str, Any]:
    """An instance of each class, in the task's initial state."""
    config = _module("constants.executable_backend_config")
    made = {}
    for name in task["involved_classes"]:
        instance = getattr(importlib.import_module(config.CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in config.STATELESS_CLASSES:
            scenario = copy.deepcopy(task["initial_config"].get(name, {}))
            instance._load_scenario(scenario, long_context="long_context" in task["id"])
        made[name] = instance
    return made


def methods(instances: Mapping[str, Any]) -> Methods:
    return {
        name: method
        for instance in instances.values()
        for name, method in inspect.getmembers(instance, predicate=inspect.ismethod)
        if not name.startswith("_")
    }


def _run(call: Callable[[], Any]) -> str:
    """The result as the model reads it, and as results are compared."""
    try:
        result = call()
    except Exception as error:
        return f"Error during execution: {error}"
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            pass
    return str(result)


def _schema(node: Any) -> Any:
    """As JSON Schema knows it."""
    if isinstance(node, list):
        return [_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    named = {"type": SCHEMA_TYPES.get(kind, kind)} if isinstance(kind, str) else {}
    return {key: _schema(value) for key, value in node.items()} | named


@functools.lru_cache(maxsize=32)
def _lines(*path: str) -> tuple[str, ...]:
    return tuple(files("bfcl_eval").joinpath("data", *path).read_text("utf-8").splitlines())


def _module(name: str) -> Any:
    return importlib.import_module(f"bfcl_eval.{name}")

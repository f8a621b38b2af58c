"""Engines that a process of its own can build in a moment, by name: no torch, no checkpoint."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import WeightsInvalid
from engine.handle import EngineInfo
from engine.model.config import ModelConfig
from engine.start.recipe import EngineRecipe
from engine.step import StepPlan, WeightsInfo
from tests.engine.host import PIECES
from tests.fake_runner import FakeRunner, FakeTicket, FakeWeights

CONFIG = EngineConfig(max_running=8, max_step_tokens=48, max_context=1024)
MODEL = ModelConfig("fake", 512, 1, 1, 1, 1, 1, 1, 1.0, 1.0, None, False, False, False, False, False, 1024, ())
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fake:
    engine: Engine
    weights: FakeWeights
    info: EngineInfo


class Runner(FakeRunner):
    """step_s: seconds that each step takes. trace: a file that gets a byte each step. An id of 511 raises."""

    def __init__(self, step_s: float, trace: Path | None, **options: Any) -> None:
        super().__init__(**options)
        self.step_s = step_s
        self.trace = trace

    def launch(self, plan: StepPlan) -> FakeTicket:
        if (plan.token_ids == 511).any():
            raise RuntimeError("the device is lost")
        time.sleep(self.step_s)
        if self.trace is not None:
            with self.trace.open("ab") as file:
                file.write(b".")
        return super().launch(plan)


class Weights(FakeWeights):
    """Path "9" takes for ever."""

    def prepare(self, path: str, version: int, checksums: dict[str, str] | None) -> WeightsInfo:
        if path == "9":
            time.sleep(1000)
        return super().prepare(path, version, checksums)


def fake(step_s: float = 0.0, trace: Path | None = None) -> Fake:
    log.info("loading 100%")
    log.debug("not wanted")
    runner = Runner(step_s, trace, num_blocks=600)
    weights = Weights(runner)
    info = EngineInfo(MODEL, 1, weights.digest, 599 * 16, (("cpu", "kv pool", 1),), "none")
    return Fake(Engine(runner, CONFIG, PIECES, weight_version=1), weights, info)


def refused() -> Fake:
    raise WeightsInvalid("model.norm.weight: expected shape [64], found [32]", field="model.norm.weight")


def broken() -> Fake:
    raise KeyError("surprise")


def ends() -> Fake:
    os._exit(3)


def hangs() -> Fake:
    log.info("hanging")
    time.sleep(1000)
    raise AssertionError


def recipe(name: str, **options: Any) -> EngineRecipe:
    return EngineRecipe(options, f"{__name__}:{name}")

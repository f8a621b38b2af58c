"""How an engine is to be built, as plain data: where it runs is decided by whoever calls `build`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol, cast

from engine.engine import Engine
from engine.handle import EngineInfo
from engine.step import WeightStore


class Built(Protocol):
    """An engine, and what its owner needs beside it."""

    @property
    def engine(self) -> Engine: ...

    @property
    def weights(self) -> WeightStore: ...

    @property
    def info(self) -> EngineInfo: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """What a builder made. info: with the time that it took."""

    engine: Engine
    weights: WeightStore
    info: EngineInfo


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """options: arguments of the builder. builder: "module:function", a name, so that whoever only passes the recipe on
    need not import torch."""

    options: Mapping[str, Any]
    builder: str = "engine.start.build:load_engine"

    def build(self) -> Built:
        """Raises what the builder raises."""
        started = time.monotonic()
        module, _, function = self.builder.partition(":")
        builder = getattr(import_module(module), function)
        imported = time.monotonic()
        built = cast(Built, builder(**self.options))
        info = replace(built.info, import_s=imported - started, load_s=time.monotonic() - imported)
        return Timed(built.engine, built.weights, info)

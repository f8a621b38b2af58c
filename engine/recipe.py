"""How an engine is to be built, as plain data: where it runs is decided by whoever calls `build`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from engine.engine import Engine
from engine.handle import EngineInfo
from engine.step import WeightStore


class Built(Protocol):
    """What a builder returns."""

    @property
    def engine(self) -> Engine: ...

    @property
    def weights(self) -> WeightStore: ...

    @property
    def info(self) -> EngineInfo: ...


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """options: arguments of the builder. builder: "module:function", a name, so that whoever only passes the recipe on
    need not import torch."""

    options: Mapping[str, Any]
    builder: str = "engine.build:load_engine"

    def build(self) -> Built:
        """Raises what the builder raises."""
        module, _, function = self.builder.partition(":")
        return cast(Built, getattr(import_module(module), function)(**self.options))

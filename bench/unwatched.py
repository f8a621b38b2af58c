"""The worker's command without metrics, and with errors alone in its log: what `bench.metrics` compares with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rollout.command import cli, start
from rollout.metrics.observer import Observer


class Unwatched(Observer):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    async def watch(self, _: Any) -> None:
        pass


class Nowhere:
    def close(self) -> None:
        pass


def main(argv: Sequence[str]) -> int:
    start.Metrics = Unwatched  # type: ignore[assignment, attr-defined]
    start.open_places = lambda _: Nowhere()  # type: ignore[assignment, attr-defined, return-value]
    return cli.main(["--log-level", "error", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Time of work on the GPU, by the events around it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

REPLAYS = 12


def median_us(run: Callable[[], object], calls: int) -> float:
    """Microseconds of each of the `calls` that `run` launches: the median of `REPLAYS` runs, the first two left out."""
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return float(np.median(times[2:]))

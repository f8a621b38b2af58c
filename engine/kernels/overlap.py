"""Whether a launch may begin before the one ahead of it has ended (programmatic dependent launch, from Hopper on).

Such a kernel does what does not depend on the launch ahead, and waits for it, whole, before the rest; every program
waits, so that waiting for one launch is waiting for all before it. Triton's interpreter has nothing of the kind.
"""

from __future__ import annotations

from functools import cache

import torch

BATCH_ROWS = 256
"""The most rows whose step is bound by reading: weights, and KV."""


@cache
def can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def between_linears(rows: int, device: torch.device) -> bool:
    """For the kernels between the linears. At 2 to 16 rows waiting programs would take the room of working ones, and
    nothing is gained; with more than BATCH_ROWS, nothing either."""
    return (rows == 1 or 16 < rows <= BATCH_ROWS) and can_overlap(device)

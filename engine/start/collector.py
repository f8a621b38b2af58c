"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc


def spare_the_collector() -> None:
    """What is loaded stays: the collector need not look at it again, which takes a large pause each time.

    Requests and results are many live objects and no garbage, so it is also called less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from engine.start.collector import spare_the_collector

loaded = [[] for _ in range(100_000)]
spare_the_collector()
assert gc.get_freeze_count() > 100_000
assert gc.get_threshold()[0] >= 10_000
gc.collect()
found = gc.get_objects()
assert len(found) < 10_000, len(found)
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() > 0
"""


def test_what_is_loaded_is_looked_at_no_more_and_new_cycles_still_go() -> None:
    """In a process of its own: what is frozen stays so."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)

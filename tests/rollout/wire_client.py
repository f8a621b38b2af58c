"""A trainer's end of the wire test: `python -m tests.rollout.wire_client ADDRESS TRAJECTORIES TOKENS`, JSON out."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

from rollout.client import RolloutClient
from tests.rollout.timed_engine import reply_ids

PROMPT = 128
GROUP = 8


def memory(pid: int | str, field: str) -> int:
    """Bytes of `VmRSS` (now) or `VmHWM` (the most so far) of a process."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def main() -> None:
    address, count, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with RolloutClient(address) as client:
        client.status()
        idle = memory("self", "VmRSS")
        groups = [
            client.group(np.ones(PROMPT, np.int32), n=GROUP, max_tokens=tokens - PROMPT) for _ in range(count // GROUP)
        ]
        began, cpu = time.monotonic(), time.process_time()
        trajectories = list(client.submit(groups))
        seconds, cpu = time.monotonic() - began, time.process_time() - cpu
        expected = reply_ids(PROMPT, tokens - PROMPT)
        whole = sum(bool(np.array_equal(t.token_ids[PROMPT:], expected)) for t in trajectories)
        names = {t.trajectory_id for t in trajectories}
        growth = memory("self", "VmHWM") - idle
        print(json.dumps({"whole": whole, "ids": len(names), "seconds": seconds, "cpu": cpu, "growth": growth}))


if __name__ == "__main__":
    main()

"""The wire alone over loopback: 1,024 trajectories of 8,192 tokens through a real worker and a real client.

    python -m bench.wire [--runs 3] [--json]

The engine is a formula that answers at once, so that what is timed is protocol, sockets and client. The worker and
the client are processes of their own; growth is each one's largest resident memory over its idle one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.report_fields import clean, commit
from tests.rollout.wire_client import memory
from tests.rollout.workers import ROOT, WorkerProcess

TRAJECTORIES, TOKENS = 1024, 8192
ARRAY_BYTES = TRAJECTORIES * TOKENS * (4 + 1 + 4 + 1)
"""token_ids, source, logprobs, loss_mask."""
SECONDS, GROWTH = 2.0, 3.0
"""What it is held to: seconds, and growth of each end as a multiple of the arrays."""


def fetch(worker: WorkerProcess) -> dict[str, Any]:
    """All trajectories once; what the client measured."""
    command = [sys.executable, "-m", "tests.rollout.wire_client", worker.address, str(TRAJECTORIES), str(TOKENS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    if not result["whole"] == result["ids"] == TRAJECTORIES:
        raise SystemExit(f"{result['whole']} whole trajectories and {result['ids']} ids of {TRAJECTORIES} came back")
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="timed runs after a warm-up")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        worker = WorkerProcess("tests.rollout.stub_worker", folder=Path(folder))
        try:
            worker.wait_ready()
            idle = memory(worker.process.pid, "VmRSS")
            runs = [fetch(worker) for _ in range(args.runs + 1)][1:]
            growth = memory(worker.process.pid, "VmHWM") - idle
        finally:
            worker.kill()
    seconds = [round(run["seconds"], 3) for run in runs]
    result = {
        "commit": commit(),
        "clean": clean(),
        "array_bytes": ARRAY_BYTES,
        "seconds": {"median": median(seconds), "runs": seconds},
        "mb_s": round(ARRAY_BYTES / 1e6 / median(seconds)),
        "worker_growth": round(growth / ARRAY_BYTES, 2),
        "client_growth": round(max(run["growth"] for run in runs) / ARRAY_BYTES, 2),
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{TRAJECTORIES} trajectories of {TOKENS} tokens, {ARRAY_BYTES / 1e6:.0f} MB of arrays")
        print(f"  {median(seconds):.2f} s (runs {seconds}), {result['mb_s']} MB/s")
        print(f"  memory over idle: worker {result['worker_growth']}x the arrays, client {result['client_growth']}x")
    missed = median(seconds) > SECONDS or max(result["worker_growth"], result["client_growth"]) > GROWTH
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

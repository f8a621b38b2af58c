"""The package as others import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import protocols

ROOT = Path(__file__).parents[2]
MEASURE = """
import sys, time
start = time.process_time()
import protocols
print(time.process_time() - start)
heavy = {"torch", "transformers", "zmq", "engine", "rollout", "tokenizers"} & set(sys.modules)
assert not heavy, heavy
"""


def test_public_names_are_listed_and_exist() -> None:
    assert len(set(protocols.__all__)) == len(protocols.__all__)
    assert all(hasattr(protocols, name) for name in protocols.__all__)


def test_it_loads_quickly_and_without_heavy_company() -> None:
    def seconds() -> float:
        done = subprocess.run([sys.executable, "-c", MEASURE], cwd=ROOT, check=True, capture_output=True, text=True)
        return float(done.stdout)

    # Of CPU time, but that too is longer where others use the machine.
    assert any(seconds() < 0.5 for _ in range(10))


THREADS = """
import sys, threading
import numpy as np
import protocols as p
sys.setswitchinterval(1e-6)
start, failures = threading.Barrier(8), []
def use():
    start.wait()
    try:
        group = p.Group(id="g", prompt=np.array([1], np.int32), trajectory_ids=["t"])
        p.decode_request(p.encode(p.SubmitBatch(id="1", batch_id="b", groups=[group])), p.Limits())
    except Exception as error:
        failures.append(repr(error))
threads = [threading.Thread(target=use) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
"""


def test_models_may_be_used_first_by_several_threads_at_once() -> None:
    subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, check=True)

"""The real command over a timed engine: `python -m tests.rollout.stub_worker [stub options] [worker options]`."""

from __future__ import annotations

import argparse
import sys
import time

from rollout.command.cli import parse, run
from rollout.command.config import WorkerConfig
from rollout.command.start import Loaded
from rollout.command.summary import Summary
from tests.rollout.timed_engine import TimedEngine
from tests.rollout.workers import served


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seconds-per-token", type=float, default=0.0)
    parser.add_argument("--prepare-s", type=float, default=0.0)
    parser.add_argument("--load-s", type=float, default=0.0)
    stub, rest = parser.parse_known_args()

    def load(config: WorkerConfig) -> Loaded:
        print("loading", flush=True)
        time.sleep(stub.load_s)
        engine = TimedEngine(seconds_per_token=stub.seconds_per_token, prepare_s=stub.prepare_s)
        return Loaded(engine, served(env=config.env), Summary({"model": "a formula"}))

    return run(parse(["--weights", "none", *rest]), load)


if __name__ == "__main__":
    sys.exit(main())

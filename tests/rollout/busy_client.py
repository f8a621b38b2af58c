"""A client in a process of its own, to be killed, stopped, or to hold its interpreter lock.

`python -m tests.rollout.busy_client ADDRESS NAME TOKENS ENVIRONMENT HOLD`: submits one trajectory, says "submitted",
holds the lock for HOLD seconds, waits for the result and says how it ended.
"""

from __future__ import annotations

import ctypes
import sys

from tests.rollout.raw_client import RawClient, group


def main() -> None:
    address, name, tokens, environment, hold = sys.argv[1:]
    with RawClient(address) as client:
        client.hello(timeout=60)
        asked = group(name, max_tokens=int(tokens), environment={"name": environment})
        reply = client.call("submit", batch_id="b", groups=[asked])
        print("submitted" if reply["type"] == "accepted" else reply, flush=True)
        # PyDLL, unlike CDLL, calls without letting go of the lock.
        ctypes.PyDLL(None).usleep(int(float(hold) * 1e6))
        record = client.record(timeout=120)
        print(record["finish_reason"], len(record["segments"][0]["token_ids"]), flush=True)


if __name__ == "__main__":
    main()

"""A client that sends nonsense: mutated frames and hostile requests, over connections that come and go."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

from tests.protocols.test_mutations import mutate
from tests.rollout.raw_client import group, pack


def requests() -> list[dict[str, Any]]:
    """Valid ones, none of which may stop others: some are hostile as they are, all are as a start for mutations."""
    message = {"id": "n", "protocol": 1}
    ids = np.array([1, 2, 3], np.int32)
    talk = [{"role": "user", "content": "Is this nonsense?"}]
    return [
        {"type": "hello", "client": "nonsense", "session": "no such token", **message},
        {"type": "submit", "batch_id": "b", "groups": [group("n", n=2, max_tokens=2)], **message},
        {"type": "submit", "batch_id": "c", "groups": [group("m", max_tokens=40)], **message},
        {"type": "submit", "batch_id": "d", "groups": [group("e", environment={"name": "nobody's"})], **message},
        {"type": "submit", "batch_id": "e", "groups": [group("r", environment={"name": "remote"})], **message},
        {"type": "submit", "batch_id": "f", "groups": [group("v", min_version=10**9, n=64)], **message},
        {"type": "submit", "batch_id": "g", "groups": [group("p", prompt=[10**6])], **message},
        {"type": "submit", "batch_id": "h", "groups": [group("t", prompt=[], messages=talk, max_tokens=2)], **message},
        {"type": "continue", "trajectory_id": "r.0", "turn": 0, "expected_len": 7, "observation": ids, **message},
        {"type": "cancel", "trajectory_ids": ["n.0", "never"], "batch_ids": ["b"], **message},
        {"type": "ack", "trajectory_ids": ["n.0"], "received_bytes": 2**62, **message},
        {"type": "score", "sequences": [ids] * 3, **message},
        {"type": "prepare_weights", "update_id": "n", "path": "/nowhere", "version": 10**9, **message},
        {"type": "commit_weights", "update_id": "n", "version": 10**9, "mode": "abort", **message},
        {"type": "abort_weights", "update_id": "n", **message},
        {"type": "sleep", **message},
        {"type": "status", **message},
        {"type": "ping", **message},
    ]


def talk_nonsense(address: str, over: Callable[[], bool], *, longest: int = 300, pause: float = 0.01) -> Counter[str]:
    """longest: messages of a connection, at most. pause: seconds between two of them."""
    rng, count = random.Random(3), Counter[str]()
    valid = [pack(message) for message in requests()]
    with zmq.Context() as context:
        while not over():
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            if rng.random() < 0.3:
                socket.setsockopt(zmq.IDENTITY, b"nonsense")
            socket.connect(address)
            socket.send_multipart(pack({"type": "hello", "id": "h", "protocol": 1, "client": "nonsense"}))
            deaf = rng.random() < 0.2
            for _ in range(rng.randint(1, longest)):
                if over():
                    break
                frames = rng.choice(valid)
                mutated = rng.random() < 0.7
                socket.send_multipart((mutate(rng, valid) or [b""]) if mutated else frames)
                count["mutated" if mutated else "hostile"] += 1
                while not deaf and socket.poll(0):
                    socket.recv_multipart()
                    count["received"] += 1
                time.sleep(pause)
            count["connections"] += 1
            socket.close()
    return count

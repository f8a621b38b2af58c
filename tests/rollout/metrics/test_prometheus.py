from __future__ import annotations

import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.handle import EngineStats
from rollout.metrics.health import Beat, Health
from rollout.metrics.prometheus import Endpoint, Latest
from rollout.metrics.row import Row


class Served:
    def __init__(self) -> None:
        self.latest = Latest(lambda: {"W&B": 3})
        self.health = Health()
        self.endpoint = Endpoint("127.0.0.1", 0, self.latest, self.health)

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.endpoint.port}{path}", timeout=20) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def samples(self) -> dict[str, float]:
        families = text_string_to_metric_families(self.get("/metrics")[1])
        return {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }

    def beat(self, state: str, **stats: int) -> None:
        now = time.monotonic()
        self.health.beat(Beat(now, state, 0, EngineStats(**stats), now))


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.endpoint.close()


def test_metrics_hold_the_newest_of_every_number(served: Served) -> None:
    served.latest.put(
        Row("round", 0.0, {"rollout/step": 1, "rollout/finish/stop": 0.25, "rollout/finish/length": 0.75})
    )
    served.latest.put(Row("gauges", 0.0, {"engine/batch_size/mean": 2.0, "wire/rx_bytes": 5}))
    served.latest.put(Row("gauges", 0.0, {"engine/batch_size/mean": 3.0, "wire/rx_bytes": 9}))
    assert served.samples() == {
        "rollout_worker_rollout_step": 1,
        "rollout_worker_rollout_finish[stop]": 0.25,
        "rollout_worker_rollout_finish[length]": 0.75,
        "rollout_worker_engine_batch_size_mean": 3.0,
        "rollout_worker_wire_rx_bytes_total": 9,
        "rollout_worker_metrics_rows_dropped_total[W&B]": 3,
    }
    text = served.get("/metrics")[1]
    assert "# HELP rollout_worker_engine_batch_size_mean tokens sampled by a step (rows)" in text
    assert "# TYPE rollout_worker_wire_rx_bytes_total counter" in text


def test_numbers_that_are_not_finite_are_served(served: Served) -> None:
    served.latest.put(Row("gauges", 0.0, {"engine/ttft_seconds_avg": math.nan, "mem/rss_gb": math.inf}))
    found = served.samples()
    assert math.isnan(found["rollout_worker_engine_ttft_seconds_avg"])
    assert found["rollout_worker_mem_rss_gb"] == math.inf


def test_health_and_readiness_are_codes_with_a_reason(served: Served) -> None:
    assert served.get("/healthz") == (200, "starting\n")
    assert served.get("/readyz") == (503, "starting\n")
    served.beat("ready", steps_total=4)
    assert served.get("/healthz") == (200, "4 steps, idle\n")
    assert served.get("/readyz") == (200, "version 0 serves\n")
    served.beat("draining")
    assert served.get("/healthz")[0] == 200
    assert served.get("/readyz") == (503, "draining\n")
    served.beat("dead")
    assert served.get("/healthz") == (503, "the engine died\n")


def test_another_path_is_not_found(served: Served) -> None:
    assert served.get("/")[0] == 404


def test_a_port_that_is_taken_raises_at_once(served: Served) -> None:
    with pytest.raises(OSError, match="in use"):
        Endpoint("127.0.0.1", served.endpoint.port, served.latest, served.health)


def test_a_peer_that_says_nothing_keeps_nobody_waiting_and_close_lets_go_of_the_port(served: Served) -> None:
    port = served.endpoint.port
    with socket.create_connection(("127.0.0.1", port)):
        assert served.get("/healthz")[0] == 200
    other = Served()
    other.endpoint.close()
    with pytest.raises(urllib.error.URLError):
        other.get("/healthz")

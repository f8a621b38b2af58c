"""`/metrics` for Prometheus, `/healthz` and `/readyz` for whoever restarts workers and routes to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.metrics.gauges import COUNTERS
from rollout.metrics.health import Health, Verdict
from rollout.metrics.row import Row

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

PREFIX = "rollout_worker_"
FINISH = "rollout/finish/"
DOCUMENTATION = "see docs/metrics.md"


class Latest(Collector):
    """The newest value of every number, under a Prometheus name: `/` becomes `_`, a finish reason a label.

    dropped: rows that each place has lost.
    """

    def __init__(self, dropped: Callable[[], dict[str, int]]) -> None:
        self._rows: dict[str, Row] = {}
        self._dropped = dropped

    def put(self, row: Row) -> None:
        self._rows = {**self._rows, row.kind: row}

    def collect(self) -> Iterator[Metric]:
        finish = GaugeMetricFamily(f"{PREFIX}rollout_finish", DOCUMENTATION, labels=["reason"])
        for name, value in sorted(item for row in self._rows.values() for item in row.values.items()):
            if name.startswith(FINISH):
                finish.add_metric([name.removeprefix(FINISH)], value)
            elif name in COUNTERS:
                yield CounterMetricFamily(_name(name), DOCUMENTATION, value=value)
            else:
                yield GaugeMetricFamily(_name(name), DOCUMENTATION, value=value)
        if finish.samples:
            yield finish
        lost = CounterMetricFamily(f"{PREFIX}metrics_rows_dropped", DOCUMENTATION, labels=["place"])
        for place, count in self._dropped().items():
            lost.add_metric([place], count)
        yield lost


def _name(name: str) -> str:
    return PREFIX + name.replace("/", "_")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 10.0

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name that http.server gave it)
        """A probe every few seconds is no news."""


class Endpoint:
    """Serves from now on, on threads of its own. Raises OSError if the port cannot be had. port 0: any free one."""

    def __init__(self, host: str, port: int, latest: Latest, health: Health) -> None:
        registry = CollectorRegistry()
        registry.register(latest)
        metrics: WSGIApplication = make_wsgi_app(registry)

        def answer(environment: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            match environment["PATH_INFO"]:
                case "/metrics":
                    return metrics(environment, start)
                case "/healthz":
                    return _verdict(health.alive(time.monotonic()), start)
                case "/readyz":
                    return _verdict(health.ready(time.monotonic()), start)
                case _:
                    return _text("404 Not Found", "there are /metrics, /healthz and /readyz", start)

        self._server = make_server(host, port, answer, _Server, _Quiet)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _verdict(verdict: Verdict, start: StartResponse) -> Iterable[bytes]:
    return _text("200 OK" if verdict.good else "503 Service Unavailable", verdict.why, start)


def _text(status: str, text: str, start: StartResponse) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]

"""`/metrics` for Prometheus, `/healthz` and `/readyz` for whoever restarts workers and routes to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.metrics.health import Health, Verdict
from rollout.metrics.names import FINISH, NAMES, Meaning
from rollout.metrics.row import Row

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

PREFIX = "rollout_worker_"
POLL_S = 0.1
"""How soon the endpoint notices that it is to close."""
AXIS = Meaning("", "where on its axis the newest row is")


class Latest(Collector):
    """The newest value of every number, under a Prometheus name: `/` becomes `_`, a finish reason a label.

    dropped: rows that each place has lost.
    """

    def __init__(self, dropped: Callable[[], dict[str, int]]) -> None:
        self._values: dict[str, float] = {}
        self._dropped = dropped

    def put(self, row: Row) -> None:
        # A new map each time: a scrape on another thread goes through the old one in peace.
        self._values = {**self._values, **row.values}

    def collect(self) -> Iterator[Metric]:
        finish = GaugeMetricFamily(f"{PREFIX}rollout_finish", NAMES[f"{FINISH}<reason>"].text, labels=["reason"])
        for name, value in sorted(self._values.items()):
            if name.startswith(FINISH):
                finish.add_metric([name.removeprefix(FINISH)], value)
                continue
            meaning = NAMES.get(name, AXIS)
            family = CounterMetricFamily if meaning.counter else GaugeMetricFamily
            yield family(PREFIX + name.replace("/", "_"), _help(meaning), value=value)
        if finish.samples:
            yield finish
        lost = CounterMetricFamily(f"{PREFIX}metrics_rows_dropped", "rows that a place lost", labels=["place"])
        for place, count in self._dropped().items():
            lost.add_metric([place], count)
        yield lost


def _help(meaning: Meaning) -> str:
    return f"{meaning.text} ({meaning.unit})" if meaning.unit else meaning.text


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the look-up of our own name, which takes its time where nobody answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


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
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="metrics endpoint", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _verdict(verdict: Verdict, start: StartResponse) -> Iterable[bytes]:
    return _text("200 OK" if verdict.good else "503 Service Unavailable", verdict.why, start)


def _text(status: str, text: str, start: StartResponse) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]

"""What was asked of an engine elsewhere and is not answered yet, so that its death leaves nobody waiting."""

from __future__ import annotations

from threading import Lock

from engine.handle import Command, Committed, CommitWeights, Prepared, PrepareWeights, Report, Submit, WeightsFailed
from engine.request import Completion, Failure, Request, refusal


class Promises:
    """Made by the thread that sends, kept by the one that receives."""

    def __init__(self) -> None:
        self._lock = Lock()
        # A request whose id is in use is answered too: an id can wait for two ends.
        self._requests: dict[str, list[Request]] = {}
        self._prepares: dict[str, None] = {}
        self._commits: dict[str, None] = {}

    def make(self, command: Command) -> None:
        """Before the engine hears of the command."""
        with self._lock:
            match command:
                case Submit(requests):
                    for request in requests:
                        self._requests.setdefault(request.id, []).append(request)
                case PrepareWeights(update_id):
                    self._prepares[update_id] = None
                case CommitWeights(update_id):
                    self._commits[update_id] = None

    def keep(self, report: Report) -> None:
        with self._lock:
            for completion in report.completions:
                requests = self._requests.get(completion.request_id, [])
                if len(requests) > 1:
                    requests.pop()
                else:
                    self._requests.pop(completion.request_id, None)
            for answer in report.weights:
                match answer:
                    case Prepared(update_id):
                        self._prepares.pop(update_id, None)
                    case Committed(update_id):
                        self._commits.pop(update_id, None)
                    case WeightsFailed(update_id):
                        # It is prepared before it is committed, so the older of the two is what failed.
                        pending = self._prepares if update_id in self._prepares else self._commits
                        pending.pop(update_id, None)

    def fail(self, failure: Failure) -> tuple[tuple[Completion, ...], tuple[WeightsFailed, ...]]:
        """Answers to all that is left; afterwards nothing is."""
        with self._lock:
            ended = tuple(refusal(request, failure) for requests in self._requests.values() for request in requests)
            updates = tuple(WeightsFailed(update_id, failure) for update_id in (*self._prepares, *self._commits))
            for pending in (self._requests, self._prepares, self._commits):
                pending.clear()
        return ended, updates

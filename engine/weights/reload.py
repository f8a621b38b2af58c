"""Weight updates in time: prepared on a thread of their own while steps run, committed between two steps.

One update at a time. A failure at any point leaves the old weights serving and admission open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from engine.engine import Engine
from engine.errors import EngineError, WeightsBusy, WeightsError, WeightsInvalid
from engine.handle import (
    Committed,
    CommitWeights,
    DiscardWeights,
    Prepared,
    PrepareWeights,
    WeightsFailed,
    WeightsReport,
)
from engine.request import Failure
from engine.step import WeightsInfo, WeightStore


@dataclass(frozen=True, slots=True)
class PrepareEnded:
    """What the preparing thread posts back."""

    command: PrepareWeights
    outcome: WeightsInfo | Exception


@dataclass(slots=True)
class Update:
    """The update under way. info: set once prepared. commit, deadline: set while a commit waits for running turns."""

    command: PrepareWeights
    info: WeightsInfo | None = None
    discarded: bool = False
    commit: CommitWeights | None = None
    deadline: float = 0.0


class Reload:
    """Handles the three weight commands; `take_reports` gives what there is to say.

    A command that is repeated is none of its affairs: whoever sends them (rollout/service/weights.py) sends each once.

    post: called from the preparing thread, once, when it is done.
    """

    def __init__(
        self,
        engine: Engine,
        store: WeightStore,
        post: Callable[[PrepareEnded], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._store = store
        self._post = post
        self._clock = clock
        self._update: Update | None = None
        self._next: PrepareWeights | None = None
        self._reports: list[WeightsReport] = []

    @property
    def deadline(self) -> float | None:
        """When `advance` must be called even if nothing else happens: now, when nothing runs that it waits for."""
        if self._update is None or self._update.commit is None:
            return None
        return self._update.deadline if self._engine.has_started else self._clock()

    def take_reports(self) -> list[WeightsReport]:
        reports, self._reports = self._reports, []
        return reports

    def prepare(self, command: PrepareWeights) -> None:
        """Start to prepare: at once, or when the reading of what is discarded ends, which nothing can break off."""
        update = self._update
        if update is None:
            self._start(command)
        elif update.discarded and self._next is None:
            self._next = command
        else:
            self._fail(command.update_id, WeightsBusy(f"update {update.command.update_id!r} is under way"))

    def prepare_ended(self, event: PrepareEnded) -> None:
        self._ended(event)
        if self._update is None and self._next is not None:
            command, self._next = self._next, None
            self._start(command)

    def commit(self, command: CommitWeights) -> None:
        """Begin to commit; `advance` ends it."""
        update = self._update
        if update is None:
            self._fail(command.update_id, WeightsInvalid("no such update is prepared", field="update_id"))
        elif update.command.update_id != command.update_id:
            self._fail(command.update_id, WeightsBusy(f"update {update.command.update_id!r} is under way"))
        elif update.info is None:
            self._fail(command.update_id, WeightsBusy("this update is still being prepared"))
        else:
            update.commit = command
            update.deadline = self._clock() + (command.drain_timeout if command.mode == "drain" else 0.0)
            self._engine.hold()

    def discard(self, command: DiscardWeights) -> None:
        if self._next is not None and self._next.update_id == command.update_id:
            self._next = None
            self._fail(command.update_id, WeightsInvalid("the update was discarded"))
            return
        update = self._update
        if update is None or update.command.update_id != command.update_id:
            return
        if update.info is None:
            update.discarded = True
        else:
            self._drop(update)

    def advance(self) -> None:
        """Commit what waits, as soon as no started request is left or its time is up."""
        update = self._update
        if update is None or update.commit is None:
            return
        if self._engine.has_started:
            command = update.commit
            if command.mode == "drain" and self._clock() < update.deadline:
                return
            if command.mode == "drain" and command.on_timeout == "fail":
                update.commit = None
                self._engine.release()
                self._reports.append(
                    WeightsFailed(
                        command.update_id,
                        Failure(
                            "weights_busy",
                            f"turns still run after {command.drain_timeout} s; the update stays prepared",
                        ),
                    )
                )
                return
            self._engine.abort_started("abort_weight_update")
        self._commit(update)

    def close(self) -> None:
        if self._update is not None and self._update.info is not None:
            self._store.discard()

    def _start(self, command: PrepareWeights) -> None:
        self._update = Update(command)
        threading.Thread(target=self._prepare, args=(command,), name="prepare-weights", daemon=True).start()

    def _ended(self, event: PrepareEnded) -> None:
        update = self._update
        assert update is not None
        if isinstance(event.outcome, Exception):
            self._update = None
            self._fail(event.command.update_id, event.outcome)
        elif update.discarded:
            self._drop(update)
        else:
            update.info = event.outcome
            self._reports.append(Prepared(event.command.update_id, event.outcome))

    def _prepare(self, command: PrepareWeights) -> None:
        try:
            info = self._store.prepare(command.path, command.version, command.checksums)
        except Exception as error:
            # Without a further name here: its traceback names this frame.
            self._post(PrepareEnded(command, error))
        else:
            self._post(PrepareEnded(command, info))

    def _commit(self, update: Update) -> None:
        assert update.info is not None
        try:
            paused = self._engine.commit(self._store.commit, update.info.version)
        except WeightsError as error:
            self._store.discard()
            self._fail(update.command.update_id, error)
        else:
            self._reports.append(Committed(update.command.update_id, update.info, paused))
        self._update = None
        self._engine.release()

    def _drop(self, update: Update) -> None:
        """Forget what was prepared; whoever still waits for an answer hears so."""
        unanswered = update.info is None or update.commit is not None
        self._update = None
        self._store.discard()
        self._engine.release()
        if unanswered:
            self._fail(update.command.update_id, WeightsInvalid("the update was discarded"))

    def _fail(self, update_id: str, error: Exception) -> None:
        failure = (
            Failure(error.code, error.message, error.field)
            if isinstance(error, EngineError)
            else Failure("internal", f"{type(error).__name__}: {error}")
        )
        self._reports.append(WeightsFailed(update_id, failure))

"""A client's calls that make new weights serve."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from protocols.errors import RolloutError, WeightsBusy
from protocols.replies import Ok, WeightsCommitted, WeightsPrepared
from protocols.requests import AbortWeightsRequest, CommitWeightsRequest, PrepareWeightsRequest
from rollout.client.call import Call
from rollout.client.core import Core
from rollout.client.push import PushedWeights, check_installed
from rollout.client.values import absolute, instance, mapping, one_of, seconds, whole
from rollout.client.waiting import Steps

if TYPE_CHECKING:
    from rollout.client.push import Weights

Path = str | os.PathLike[str]
Mode = Literal["drain", "abort", "keep_kv", "recompute_kv"]
OnTimeout = Literal["abort", "fail"]
ATTEMPTS = 3
"""Of an update whose worker restarts in the middle: more often it is the update that it dies of."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What `update_weights` did. digest: of the weights that serve now. paused_s: no engine step ran that long."""

    version: int
    digest: str
    update_id: str
    bytes: int
    load_s: float
    paused_s: float


class WeightCalls:
    _core: Core
    _pushed: PushedWeights
    _updating: threading.Lock
    _work: Callable[[Callable[[], T], Callable[[T], None]], Future[T]]

    @Call
    def update_weights(
        self,
        path: Path,
        version: int,
        *,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: OnTimeout = "abort",
        digest: str | None = None,
        checksums: Mapping[str, str] | None = None,
        force: bool = False,
        timeout: float = 600.0,
    ) -> Steps[WeightUpdate]:
        """Make the safetensors at `path` (on the worker's file system) serve as `version`: prepare, then commit.

        mode: what becomes of turns that run at the commit; `drain` lets them end for at most `drain_timeout`
        seconds, then they are aborted or the commit fails (`on_timeout`). digest: refuse unless the weights read
        have it. checksums: file name -> "sha256:hex". force: allow a lower version. timeout: seconds for reading,
        and again for copying, on top of the drain. Whatever is raised, either the old weights serve or the new. One
        at a time: WeightsBusy for a second one, of this client or another.

        Keep the path until the next update: after a restart the worker reads it again. A relative one starts from
        this process's working directory.
        """
        _drain_s(mode, drain_timeout, on_timeout)  # what is wrong is said before all of them are read
        with _alone(self._updating):
            update_id = f"update-{secrets.token_hex(6)}"
            for attempt in range(1, ATTEMPTS + 1):
                boot_id = self._core.boot_id
                try:
                    prepared = yield from WeightCalls.prepare_weights(
                        self, path, version, update_id=update_id, checksums=checksums, force=force, timeout=timeout
                    )
                except BaseException:  # the wait may have been broken off too
                    # Prepared after all, it would be in the way of every other client for as long as this one lives.
                    self._core.forget_update(update_id)
                    raise
                try:
                    committed = yield from WeightCalls.commit_weights(
                        self,
                        prepared,
                        mode=mode,
                        drain_timeout=drain_timeout,
                        on_timeout=on_timeout,
                        digest=digest,
                        timeout=timeout,
                    )
                except RolloutError:
                    # A worker that has restarted in between has forgotten the prepared bytes.
                    if self._core.boot_id != boot_id and attempt < ATTEMPTS:
                        continue
                    self._core.forget_update(update_id)
                    raise
                return WeightUpdate(
                    version=committed.version,
                    digest=committed.digest,
                    update_id=update_id,
                    bytes=prepared.bytes,
                    load_s=prepared.load_s,
                    paused_s=committed.paused_s,
                )
            raise AssertionError("the last attempt returns or raises")

    @Call
    def push_weights(
        self,
        weights: Weights,
        version: int,
        *,
        directory: Path | None = None,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: OnTimeout = "abort",
        force: bool = False,
        timeout: float = 600.0,
    ) -> Steps[WeightUpdate]:
        """Make a live torch model serve as `version`: write its weights where the worker reads them, then
        `update_weights`. Needs torch and safetensors here.

        weights: a model, its state dict, or (name, tensor) pairs, under Hugging Face names; what DDP, torch.compile,
        FSDP and activation checkpointing add to names is taken off, a head that is the embedding itself left out.
        directory: one that is there and that the worker can read too; required of a worker on another machine, else
        a temporary one.

        Written is a folder of this client in `directory`, which appears when it is whole and goes when the next push
        serves, when the update is refused, and when the client is closed. Raises, beside what `update_weights`
        raises, WeightsInvalid for a tensor that cannot be handed over (a shard, another dtype, an adapter's), OSError,
        and NotInstalled; the old weights serve on.
        """
        check_installed()
        # The worker is not asked before all of them are written.
        whole(version, "version")
        _drain_s(mode, drain_timeout, on_timeout)
        self._core.wait(timeout)
        yield self._core.greeted(None)
        path = yield self._work(partial(self._pushed.write, weights, version, directory), self._pushed.remove)
        with self._pushed.keeping(path):
            return (
                yield from WeightCalls.update_weights(
                    self,
                    path,
                    version,
                    mode=mode,
                    drain_timeout=drain_timeout,
                    on_timeout=on_timeout,
                    force=force,
                    timeout=timeout,
                )
            )

    @Call
    def prepare_weights(
        self,
        path: Path,
        version: int,
        *,
        update_id: str | None = None,
        checksums: Mapping[str, str] | None = None,
        force: bool = False,
        timeout: float = 600.0,
    ) -> Steps[WeightsPrepared]:
        """Read and check weights while generation goes on; serve them later by `commit_weights`."""
        message = self._core.message(
            PrepareWeightsRequest,
            update_id=f"update-{secrets.token_hex(6)}" if update_id is None else update_id,
            path=absolute(path, "path", ": a live model goes to push_weights"),
            version=version,
            checksums=None if checksums is None else mapping(checksums, "checksums"),
            force=force,
        )
        return (yield from self._core.ask(message, WeightsPrepared, timeout))

    @Call
    def commit_weights(
        self,
        prepared: WeightsPrepared,
        *,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: OnTimeout = "abort",
        digest: str | None = None,
        timeout: float = 600.0,
    ) -> Steps[WeightsCommitted]:
        """Make prepared weights serve. Repeating it for weights that serve already is harmless."""
        instance(prepared, WeightsPrepared, "prepared")
        drain_s = _drain_s(mode, drain_timeout, on_timeout)
        message = self._core.message(
            CommitWeightsRequest,
            update_id=prepared.update_id,
            version=prepared.version,
            digest=prepared.digest if digest is None else digest,
            mode=mode,
            drain_timeout_s=drain_s,
            on_drain_timeout=on_timeout,
        )
        return (yield from self._core.ask(message, WeightsCommitted, self._core.wait(timeout) + (drain_s or 0.0)))

    @Call
    def abort_weights(self, prepared: WeightsPrepared | str, *, timeout: float | None = None) -> Steps[None]:
        """Make the worker forget prepared weights (given by the reply or by the update id)."""
        instance(prepared, WeightsPrepared | str, "prepared")
        update_id = prepared.update_id if isinstance(prepared, WeightsPrepared) else prepared
        yield from self._core.ask(self._core.message(AbortWeightsRequest, update_id=update_id), Ok, timeout)


@contextmanager
def _alone(updating: threading.Lock) -> Iterator[None]:
    """The worker takes the second update of a client for one in the place of the first. Raises WeightsBusy."""
    if not updating.acquire(blocking=False):
        raise WeightsBusy("another update of this client is under way")
    try:
        yield
    finally:
        updating.release()


def _drain_s(mode: Mode, drain_timeout: float, on_timeout: OnTimeout) -> float | None:
    """Seconds that a commit may wait for running turns. Raises BadRequest naming the argument that is wrong."""
    one_of(mode, get_args(Mode), "mode")
    one_of(on_timeout, get_args(OnTimeout), "on_timeout")
    return seconds(drain_timeout, "drain_timeout") if mode == "drain" else None

"""`weight_transfer=` of `trl.experimental.async_grpo.AsyncGRPOTrainer`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from rollout.client import RolloutClient
from rollout.client.weights import Mode, OnTimeout

if TYPE_CHECKING:
    import torch


class WorkerWeights:
    """TRL's `WeightTransferProtocol`: each set of weights is pushed as the worker's next version.

    directory, mode, drain_timeout, on_timeout: of `RolloutClient.push_weights`. The client is the caller's to close.
    """

    def __init__(
        self,
        client: RolloutClient,
        *,
        directory: str | os.PathLike[str] | None = None,
        mode: Mode = "drain",
        drain_timeout: float = 60.0,
        on_timeout: OnTimeout = "abort",
    ) -> None:
        self._client = client
        self._push = partial(
            client.push_weights, directory=directory, mode=mode, drain_timeout=drain_timeout, on_timeout=on_timeout
        )
        self._version = 0

    def init_weight_transfer(self) -> None:
        """Wait for the worker; whatever it serves, the trainer's first weights are one version newer."""
        self._version = self._client.ping().weight_version

    def pause(self) -> None:
        """Nothing: the worker goes on while the weights are written and read, and pauses itself to commit them."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Returns when they serve. Raises what `push_weights` raises; the old weights then serve on."""
        self._version += 1
        self._push(iterator, self._version)

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def destroy(self) -> None:
        """Nothing: what was written goes with the client."""

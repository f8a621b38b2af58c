"""The one seam between the worker and the engine: plain data each way, at most one message a step back.

The worker sends `Command`s and receives `Report`s; neither holds a callable or a future, so that the same values
cross a thread (CPU, tests) or a process boundary (GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.model.config import ModelConfig
from engine.request import Completion, Failure, FinishReason, Request
from engine.step import WeightsInfo

CommitMode = Literal["drain", "abort"]


@dataclass(frozen=True, slots=True)
class Submit:
    """Each request ends in exactly one `Completion`; one that is refused ends at once with "error"."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End requests early with `reason`; unknown and finished ids are ignored."""

    request_ids: tuple[str, ...]
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class ReleaseKv:
    """No further turn of these trajectories comes: `Request.trajectory` of their requests; unknown ones are ignored."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by a report, whether or not there is anything to say."""


@dataclass(frozen=True, slots=True)
class PrepareWeights:
    """Read and check a checkpoint in the background. Answered by `Prepared` or `WeightsFailed`."""

    update_id: str
    path: str
    version: int
    checksums: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CommitWeights:
    """Make a prepared update serve. Answered by `Committed` or `WeightsFailed`.

    drain: no waiting request starts, started ones (preempted ones too) run to their end, then commit; after
    `drain_timeout` seconds what is left is aborted (`on_timeout="abort"`) or the commit fails with the old weights
    serving (`"fail"`). abort: started requests end at once with "abort_weight_update". Requests that never
    started wait in both modes and run under the new weights.
    """

    update_id: str
    mode: CommitMode = "drain"
    drain_timeout: float = 60.0
    on_timeout: Literal["abort", "fail"] = "abort"


@dataclass(frozen=True, slots=True)
class DiscardWeights:
    update_id: str


@dataclass(frozen=True, slots=True)
class Pause:
    """Launch no further step (requests stay) until `Resume`."""


@dataclass(frozen=True, slots=True)
class Resume:
    pass


Command = Submit | Abort | Ping | ReleaseKv | PrepareWeights | CommitWeights | DiscardWeights | Pause | Resume


@dataclass(frozen=True, slots=True)
class Prepared:
    update_id: str
    info: WeightsInfo


@dataclass(frozen=True, slots=True)
class Committed:
    """paused: seconds in which no step ran because of this commit."""

    update_id: str
    info: WeightsInfo
    paused: float


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    update_id: str
    failure: Failure


WeightsReport = Prepared | Committed | WeightsFailed


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of now and counters since start (the latter say so).

    Of the steps launched, prompt_steps_total held prompt tokens, and graph_steps_total replayed captured graphs.
    kv_holds: trajectories between turns whose KV is held, in `blocks_held` blocks that nobody else uses (those are
    among `blocks_used`).
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_held: int = 0
    kv_holds: int = 0
    weight_version: int = 0
    paused: bool = False
    steps_total: int = 0
    prompt_steps_total: int = 0
    sampled_tokens_total: int = 0
    prompt_tokens_total: int = 0
    computed_prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    preemptions_total: int = 0
    kv_holds_dropped_total: int = 0
    bubbles_total: int = 0
    wasted_rows_total: int = 0
    graph_steps_total: int = 0
    split_steps_total: int = 0
    padding_tokens_total: int = 0
    nonfinite_total: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What happened since the last report.

    died: the engine stopped for good. What has no answer by then gets none, nor does what is still asked for.
    """

    completions: tuple[Completion, ...] = ()
    weights: tuple[WeightsReport, ...] = ()
    stats: EngineStats = EngineStats()
    died: Failure | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What was built, for whoever owns the handle.

    kv_tokens: what the KV pool holds. memory: what was taken at start, as (device, tag, bytes), in that order. rest:
    what else there is on these devices, likewise; "free" of each is last. torch: its version, where the engine runs.
    gpu: its name, or "". import_s: seconds in which libraries were imported; load_s: seconds from there to ready.
    """

    model: ModelConfig
    weight_version: int
    weight_digest: str
    kv_tokens: int
    memory: tuple[tuple[str, str, int], ...]
    torch: str
    rest: tuple[tuple[str, str, int], ...] = ()
    gpu: str = ""
    import_s: float = 0.0
    load_s: float = 0.0


class EngineHandle(Protocol):
    def start(self, deliver: Callable[[Report], None]) -> None:
        """Start the engine. `deliver` is called from a thread of the handle's, at most once a step."""

    def send(self, command: Command) -> None:
        """Hand over a command. Thread-safe; never blocks on a step."""

    def close(self, timeout: float) -> bool:
        """Stop the engine; whatever still runs is dropped. False if it did not stop in `timeout` seconds."""

"""Every number there is: its name, unit and meaning. docs/metrics.md and Prometheus' help are made from this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FINISH: Final = "rollout/finish/"
"""Is followed by a finish reason."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """counter: it only grows, from the worker's start on."""

    unit: str
    text: str
    counter: bool = False


_PARTS = {
    "queue": "waited to start, or between turns for a place in the engine",
    "prefill": "its prompt and observations were computed",
    "decode": "it sampled",
    "preempted": "it had given its KV cache up to others",
    "paused": "the engine stood still: weights were committed, or a client paused it",
    "tool_wait": "its environment, or the trainer's answer, had it",
}

NAMES: Final[dict[str, Meaning]] = {
    "rollout/tokens_per_s": Meaning("1/s", "sampled tokens of the round by its time"),
    "rollout/trajectories_per_s": Meaning("1/s", "trajectories of the round by its time"),
    "rollout/round_time_s": Meaning("s", "from the accept of the batch to the end of its last trajectory"),
    "rollout/tail_ratio": Meaning("", "share of the round in which only its last tenth of trajectories still ran"),
    "rollout/response_len/mean": Meaning("tokens", "sampled by a trajectory that ended by itself"),
    "rollout/response_len/p50": Meaning("tokens", "the same, median"),
    "rollout/response_len/p95": Meaning("tokens", "the same, 95th percentile"),
    "rollout/response_len/max": Meaning("tokens", "the same, longest"),
    "rollout/num_turns/mean": Meaning("turns", "of a trajectory that ended by itself"),
    "rollout/num_turns/max": Meaning("turns", "the same, most"),
    "rollout/truncated_ratio": Meaning("", "share that a limit ended"),
    "rollout/aborted_ratio": Meaning("", "share that was ended from outside, surplus included"),
    "rollout/failed_ratio": Meaning("", "share that failed, in the environment or in the model"),
    f"{FINISH}<reason>": Meaning("", "share that ended for this reason; they add up to 1"),
    "rollout/group_completion_time/mean": Meaning("s", "from a group's accept to the end of its last sample"),
    "rollout/group_completion_time/p90": Meaning("s", "the same, 90th percentile"),
    "rollout/group_completion_time/max": Meaning("s", "the same, slowest"),
    **{
        f"rollout/time/{part}_s/{which}": Meaning("s", f"{text}{' (95th percentile)' if which == 'p95' else ''}")
        for part, text in _PARTS.items()
        for which in ("mean", "p95")
    },
    "rollout/recomputed_ratio": Meaning(
        "0 to 1", "of what a turn's predecessor had computed, in whole KV blocks, share that was computed again for it"
    ),
    "rollout/staleness/mean": Meaning("versions", "serving at a trajectory's end, less the oldest it sampled under"),
    "rollout/staleness/max": Meaning("versions", "the same, most"),
    "rollout/self_logprob_abs_diff": Meaning(
        "nats", "mean over one trajectory: its logprobs as returned, and scored again in one piece (--self-check)"
    ),
    "rollout/nonfinite_count": Meaning("trajectories", "that ended as numerical_error"),
    "rollout/cut/count": Meaning("trajectories", "cut as surplus when the batch had enough"),
    "rollout/cut/kept_len_mean": Meaning("tokens", "sampled by those that were kept, where any were cut"),
    "rollout/cut/cut_len_mean": Meaning("tokens", "sampled by those that were cut, until then"),
    "engine/num_requests_running": Meaning("requests", "in the engine's steps"),
    "engine/num_requests_waiting": Meaning("requests", "in the engine, for a place"),
    "engine/kv_cache_usage_perc": Meaning("0 to 1", "share of the KV blocks that are taken"),
    "engine/preemptions": Meaning("", "requests that gave their KV blocks up and were computed again", counter=True),
    "engine/prefix_cache_hit_rate": Meaning("0 to 1", "share of prompt tokens found in the prefix cache"),
    "engine/ttft_seconds_avg": Meaning("s", "from a turn's submit to its first token"),
    "engine/tpot_seconds_avg": Meaning("s", "between two tokens of a turn"),
    "engine/cuda_graph_hit_rate": Meaning("0 to 1", "share of steps that replayed a captured graph; 0 on the CPU"),
    "engine/split_kv_steps": Meaning("steps", "whose attention cut long rows into parts", counter=True),
    "engine/batch_size/mean": Meaning("rows", "tokens sampled by a step"),
    "env/processes": Meaning("processes", "that environments and tools run in (--env-processes)"),
    "env/calls_waiting": Meaning("calls", "of tools, for a process to be free"),
    "env/call_wait_s_avg": Meaning("s", "a call of a tool waited for its process"),
    "env/no_process": Meaning("", "calls of tools and environments that got no process in time", counter=True),
    "env/process_deaths": Meaning("", "processes that died, or were killed at a deadline", counter=True),
    "weights/version": Meaning("", "of the weights that serve"),
    "weights/load_s": Meaning("s", "the last update took to be read and checked, beside generation"),
    "weights/paused_s": Meaning("s", "no step ran because of the last commit"),
    "weights/bytes": Meaning("bytes", "of the last update"),
    "weights/failures": Meaning("", "preparations and commits that failed or were given up", counter=True),
    "mem/rss_gb": Meaning("GB", "resident memory of the worker and of its engine's process"),
    "mem/gpu_gb": Meaning("GB", "taken on the GPU: weights, KV cache, workspaces"),
    "mem/free_blocks": Meaning("blocks", "of the KV cache, 16 tokens each, that are free or reusable"),
    "wire/rx_bytes": Meaning("bytes", "received from clients", counter=True),
    "wire/tx_bytes": Meaning("bytes", "sent to clients", counter=True),
    "wire/queue_depth": Meaning("messages", "that wait for a client to take them"),
    "wire/credit_stalls": Meaning(
        "", "times a trajectory waited for room among results not acknowledged", counter=True
    ),
}

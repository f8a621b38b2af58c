"""One telling example of every message: what the golden vectors hold and the mutations start from."""

from __future__ import annotations

import numpy as np

from protocols import (
    AbortWeightsRequest,
    Accepted,
    Ack,
    BatchDone,
    Budget,
    Cancel,
    Chunk,
    CommitWeightsRequest,
    Continue,
    Drain,
    Environment,
    ErrorReply,
    Failure,
    Group,
    GroupDone,
    Hello,
    Limits,
    ModelInfo,
    Ok,
    Partial,
    PauseRequest,
    Ping,
    Pong,
    PrepareWeightsRequest,
    Record,
    Reply,
    Request,
    ResumeRequest,
    Sampling,
    Score,
    Scored,
    ScriptedTurn,
    Segment,
    SleepRequest,
    StatusRequest,
    SubmitBatch,
    Template,
    Times,
    TrajectoryDone,
    Truncation,
    Turn,
    TurnDone,
    WakeRequest,
    WeightsCommitted,
    WeightsPrepared,
    WeightsProgress,
    Welcome,
    WorkerStatus,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def marks(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def runs(*values: tuple[int, int]) -> np.ndarray:
    return np.array(values, np.int64).reshape(-1, 2)


def segment() -> Segment:
    """Two prompt tokens, one sampled under version 3, one observed, two sampled under version 4."""
    return Segment(
        token_ids=ids(9906, 11, 1917, 0, 151644, 151645),
        source=marks(0, 0, 1, 3, 1, 1),
        logprobs=floats(0, 0, -0.5, 0, -1.25, -0.0625),
        loss_mask=marks(0, 0, 1, 0, 1, 1),
        weight_versions=runs((3, 1), (4, 2)),
        kv_versions=runs((3, 3)),
        turns=(
            Turn(index=0, start=2, length=1, finish_reason="length", prompt_len=2, computed_tokens=2),
            Turn(
                index=1,
                start=4,
                length=2,
                finish_reason="stop",
                stop="151645",
                prompt_len=4,
                cached_tokens=3,
                computed_tokens=1,
                preemptions=1,
                times=Times(decode=0.5),
                reward=0.5,
            ),
        ),
        more_logprobs={"raw": floats(0, 0, -0.75, 0, -1.5, -0.125)},
        prompt_logprobs=floats(float("nan"), -2.5),
        top_ids=np.array([[1917, 2], [151644, 1], [151645, 3]], np.int32),
        top_logprobs=np.array([[-0.5, -1], [-1.25, float("-inf")], [-0.0625, -3]], np.float32),
    )


def record() -> Record:
    return Record(
        trajectory_id="t-1",
        group_id="g-1",
        batch_id="b-1",
        sample_index=1,
        status="truncated",
        finish_reason="max_total_tokens",
        segments=(segment(),),
        sampling=Sampling(seed=17, max_tokens=2, logprobs=("processed", "raw"), top_logprobs=2, prompt_logprobs=True),
        reward=0.75,
        rewards={"format": 0.25, "answer": 0.5},
        truncation=Truncation(limit="max_total_tokens", value=6),
        times=Times(queue=0.25, prefill=0.125, decode=0.5, tool_wait=0.125),
        wall_s=1.0,
        metadata={"task": "find", "tags": ["a", None], "nested": {"k": 1}},
    )


def failed_record() -> Record:
    whole = segment()
    return Record(
        trajectory_id="t-2",
        group_id="g-1",
        batch_id="b-1",
        sample_index=0,
        status="failed",
        finish_reason="env_error",
        segments=(whole.model_copy(update={"loss_mask": np.zeros_like(whole.loss_mask)}),),
        sampling=Sampling(seed=2**64 - 1),
        error=Failure(code="internal", message="ValueError: no such tool", scope="trajectory", stage="step"),
    )


SAID = b'[{"role":"assistant","content":"12"},{"role":"user","content":"And?"}]'


def partial(group_id: str, trajectory_id: str) -> Record:
    """A trajectory that was cut after one sampled token."""
    return Record(
        trajectory_id=trajectory_id,
        group_id=group_id,
        batch_id="b-0",
        sample_index=0,
        status="aborted",
        finish_reason="abort_surplus",
        segments=(
            Segment(
                token_ids=ids(1, 7),
                source=marks(0, 1),
                logprobs=floats(0, -0.5),
                loss_mask=marks(0, 1),
                weight_versions=np.array([[3, 1]], np.int64),
                kv_versions=np.array([[3, 1]], np.int64),
                turns=(Turn(index=0, start=1, length=1, finish_reason="abort_client"),),
            ),
        ),
        sampling=Sampling(seed=17),
        retries=1,
        partial=Partial(max_tokens=256, snapshot={"page": 3}, messages=np.frombuffer(SAID, np.uint8)),
    )


def submit() -> SubmitBatch:
    return SubmitBatch(
        id="7",
        batch_id="b-1",
        step=40,
        groups=(
            Group(
                id="g-1",
                prompt=ids(9906, 11, 1917),
                trajectory_ids=("t-1", "t-2"),
                sampling=Sampling(
                    temperature=0.5,
                    top_k=20,
                    top_p=0.875,
                    allowed_ids=ids(1, 2, 3),
                    bias_ids=ids(2),
                    bias_values=floats(-1.5),
                    seed=17,
                    max_tokens=256,
                    stop_ids=(151645,),
                    stop=("\n\n", "Ende."),
                    logprobs=("processed", "raw"),
                ),
                environment=Environment(
                    script=(
                        ScriptedTurn(glue=ids(151645), observation=ids(5, 6), max_tokens=8),
                        ScriptedTurn(observation=ids()),
                    )
                ),
                budget=Budget(max_turns=3, max_total_tokens=4096, turn_deadline_s=30, on_length="end"),
                sample_indices=(4, 5),
                prompt_source=marks(0, 1, 4),
                metadata={"task": "find", "level": 3, "weight": 0.5, "raw": b"\x00\x01", "tags": ["a", None, True]},
                priority=-1,
                min_version=3,
                max_staleness=2,
            ),
            Group(
                id="g-2",
                prompt=ids(1),
                trajectory_ids=("t-3",),
                environment=Environment(name="search", config={"index": "wiki", "k": 5}),
                counted=1,
                purpose="eval",
            ),
            Group(
                id="g-3",
                messages=(
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "How warm is it in Orléans?"}]},
                    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather"}}]},
                ),
                tools=({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},),
                template=Template(options={"enable_thinking": False}, on_user_turn="drop"),
                trajectory_ids=("t-4",),
                environment=Environment(name="tools"),
            ),
        ),
        groups_needed=1,
        surplus="return",
        max_retries=2,
        resume=("t-9",),
        partials=(partial("g-2", "t-3"),),
    )


REQUESTS: dict[str, Request] = {
    message.type: message
    for message in (
        Hello(id="1", client="trainer-0", session="s-1"),
        submit(),
        Continue(
            id="3",
            trajectory_id="t-1",
            turn=0,
            expected_len=5,
            glue=ids(151645, 198),
            observation=ids(7, 8),
            max_tokens=64,
            turn_reward=0.5,
        ),
        Cancel(id="4", trajectory_ids=("t-1",), group_ids=("g-2",)),
        Ack(id="5", trajectory_ids=("t-1", "t-2"), received_bytes=123456789012),
        PrepareWeightsRequest(
            id="6", update_id="u-4", path="weights/4", version=4, checksums={"model.safetensors": "sha256:00ff"}
        ),
        CommitWeightsRequest(
            id="7", update_id="u-4", version=4, digest="d", drain_timeout_s=5, on_drain_timeout="fail"
        ),
        AbortWeightsRequest(id="8", update_id="u-4"),
        PauseRequest(id="9"),
        ResumeRequest(id="10"),
        SleepRequest(id="11", level=2),
        WakeRequest(id="12"),
        Score(id="13", sequences=(ids(1, 2, 3), ids(4)), sampled=(marks(0, 1, 1), marks(0))),
        StatusRequest(id="14"),
        Drain(id="15", timeout_s=30),
        Ping(id="16"),
    )
}

REPLIES: dict[str, Reply] = {
    message.type: message
    for message in (
        Welcome(
            id="1",
            session="s-1",
            resumed=True,
            boot_id="boot-1",
            worker_version="0.1.0",
            model=ModelInfo(
                architecture="Qwen3ForCausalLM",
                dtype="bfloat16",
                vocab_size=151936,
                max_context=40960,
                eos_ids=(151645, 151643),
                tokenizer_hash="sha256:00",
            ),
            weight_version=3,
            weight_digest="xxh",
            capabilities=("scripted", "remote"),
            environments=("scripted", "remote", "search"),
            limits=Limits(max_context=40960),
            open_trajectories=("t-1",),
        ),
        Accepted(id="7", batch_id="b-1", trajectories=3, known=1),
        WeightsPrepared(id="6", update_id="u-4", version=4, digest="d", bytes=8_045_000_000, load_s=2.5),
        WeightsCommitted(id="7", update_id="u-4", version=4, digest="d", paused_s=0.125),
        Ok(id="4", detail={"running": 1, "unknown": 0}),
        Scored(id="13", weight_version=4, logprobs={"processed": (floats(float("nan"), -1, -2), floats(float("nan")))}),
        WorkerStatus(
            id="14",
            state="ready",
            boot_id="boot-1",
            uptime_s=12.5,
            weight_version=4,
            weight_digest="d",
            trajectories_running=2,
            trajectories_waiting=1,
            results_unacknowledged=0,
            sessions=1,
            engine={"num_requests_running": 2},
            wire={"rx_bytes": 1024, "tx_bytes": 4096},
            environments={"processes": 3},
        ),
        Pong(id="16", boot_id="boot-1", weight_version=4),
        ErrorReply(
            id="7",
            error=Failure(
                code="bad_request",
                message="must be less than or equal to 1, not 1.5",
                field="groups[3].sampling.top_p",
            ),
        ),
        TurnDone(
            id="7",
            trajectory_id="t-1",
            turn=Turn(index=0, start=3, length=2, finish_reason="tool_calls"),
            total_len=5,
            token_ids=ids(10, 11),
            logprobs=floats(-0.5, -0.25),
        ),
        TrajectoryDone(id="7", record=record()),
        GroupDone(
            id="7", batch_id="b-1", group_id="g-1", counts={"completed": 1, "truncated": 1}, complete=True, kept=1
        ),
        BatchDone(
            id="7", batch_id="b-1", counts={"completed": 2, "failed": 1}, wall_s=3.5, cut=1, cut_tokens=9, kept=("t-4",)
        ),
        WeightsProgress(id="6", update_id="u-4", stage="reading", fraction=0.5),
        Chunk(id="7", of=2, offset=0, data=(marks(1, 2, 3), marks(4)), sizes=np.array([3, 5, 0], np.int64)),
    )
}

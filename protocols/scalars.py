"""The small types of the wire: arrays by dtype, bounded numbers, names, and the words a field may hold.

An array travels as a blob of its own behind the msgpack header (codec.py); in a message it is a numpy array whose
dtype and number of dimensions the field fixes. Received arrays are read-only views of the received frame.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, StringConstraints

from protocols.base import ArraySpec

PROTOCOL: Final = 1


Int32 = Annotated[npt.NDArray[np.int32], ArraySpec("<i4")]
Int32Matrix = Annotated[npt.NDArray[np.int32], ArraySpec("<i4", 2)]
Int64 = Annotated[npt.NDArray[np.int64], ArraySpec("<i8")]
Int64Matrix = Annotated[npt.NDArray[np.int64], ArraySpec("<i8", 2)]
UInt8 = Annotated[npt.NDArray[np.uint8], ArraySpec("|u1")]
Float32 = Annotated[npt.NDArray[np.float32], ArraySpec("<f4")]
Float32Matrix = Annotated[npt.NDArray[np.float32], ArraySpec("<f4", 2)]

Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""An id or a name: of a message, session, batch, group, trajectory, update, environment."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Size = Annotated[int, Field(ge=0, lt=2**63)]
Version = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LogprobMode = Literal["processed", "temperature", "raw"]
Reward = Annotated[float, Field(allow_inf_nan=False)]

# What an entry of `source` says about its token.
SOURCE_PROMPT, SOURCE_SAMPLED, SOURCE_GLUE, SOURCE_OBSERVATION, SOURCE_PREFIX = range(5)

TurnReason = Literal[
    "stop",
    "tool_calls",
    "length",
    "context_overflow",
    "turn_deadline",
    "abort_client",
    "abort_weight_update",
    "error",
]
TrajectoryReason = Literal[
    "env_done",
    "max_turns",
    "max_total_tokens",
    "context_overflow",
    "length",
    "tool_deadline",
    "trajectory_deadline",
    "stop",
    "abort_client",
    "abort_surplus",
    "abort_stale",
    "abort_shutdown",
    "abort_weight_update",
    "env_error",
    "numerical_error",
    "error",
]
Status = Literal["completed", "truncated", "aborted", "failed"]
STATUS_OF: Final[dict[TrajectoryReason, Status]] = {
    "env_done": "completed",
    "max_turns": "completed",
    "stop": "completed",
    "length": "truncated",
    "max_total_tokens": "truncated",
    "context_overflow": "truncated",
    "tool_deadline": "truncated",
    "trajectory_deadline": "truncated",
    "abort_client": "aborted",
    "abort_surplus": "aborted",
    "abort_stale": "aborted",
    "abort_shutdown": "aborted",
    "abort_weight_update": "aborted",
    "env_error": "failed",
    "numerical_error": "failed",
    "error": "failed",
}
"""The one table from why a trajectory ended to what that makes of it."""
Purpose = Literal["train", "eval"]
Scope = Literal["request", "trajectory", "batch", "session", "worker"]
"""What an error costs."""

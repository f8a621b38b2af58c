"""Engine configuration: frozen, complete, checked once; derived values are properties."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16
"""Tokens of one KV block. Prefix hits are whole blocks."""

MAX_TOP_LOGPROBS = 64
"""Alternatives that a request may ask for: bounds the result buffers."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the host side of the engine needs to know; nothing about devices.

    max_running: slots, the largest number of rows of a step.
    max_step_tokens: query tokens of one step, decode rows included.
    max_context: longest sequence (prompt and sampled tokens together).
    overlap: launch step N+1 before step N's result is read.
    prefix_cache: share whole blocks of equal prefixes.
    """

    max_running: int = 64
    max_step_tokens: int = 2048
    max_context: int = 4096
    overlap: bool = True
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_running", "max_step_tokens", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) must be at least max_running ({self.max_running}): "
                "each running request decodes one token a step"
            )

    @property
    def max_blocks_per_request(self) -> int:
        return -(-self.max_context // BLOCK_SIZE)

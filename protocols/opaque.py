"""Maps that the wire carries and does not interpret: metadata, configurations, chat messages, schemas of tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgpack
import numpy as np
from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, core_schema

from protocols.base import Bad, BlobRef, Received, plain, refuse

if TYPE_CHECKING:
    from protocols.limits import Limits


class OpaqueSpec:
    """Pydantic annotation: a map that the wire does not interpret. Plain data, no arrays, bounded when received.

    Allowed are None, bool, int (-2**63 to 2**64 - 1), float, str, bytes, lists and maps with string keys; tuples
    become lists and numbers of numpy or torch plain ones, so that what is echoed equals what was sent. limit: the field
    of `Limits` that says how large a received one may be.
    """

    def __init__(self, limit: str = "max_metadata") -> None:
        self._limit = limit

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_plain_validator_function(
            self._check,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value),
        )

    def _check(self, value: Any, info: ValidationInfo) -> dict[str, Any]:
        received = info.context if isinstance(info.context, Received) else None
        if not isinstance(value, dict):
            refuse(value.why if isinstance(value, Bad) else "must be a map")
        if not value:
            return {}
        plain = _Plain(received.limits if received else None, self._limit)
        copy = plain.copy(value, "", 1)
        assert isinstance(copy, dict)
        if received and len(msgpack.packb(copy, buf_size=4096)) > plain.largest:
            refuse(f"is larger than {self._limit}, {plain.largest} bytes")
        return copy


class _Plain:
    """One walk over an opaque map. With limits it stops as soon as they are passed, not after."""

    DEEPEST = 256

    def __init__(self, limits: Limits | None, limit: str) -> None:
        self.deepest = limits.max_nesting if limits else self.DEEPEST
        self.limit = limit
        self.largest: int = getattr(limits, limit) if limits else 0
        self.limits = limits
        self.size = 0

    def copy(self, value: Any, at: str, depth: int) -> Any:
        self.size += 1
        value = plain(value)
        if isinstance(value, str):
            self.size += _utf8_size(value, at)
        elif isinstance(value, bytes):
            self.size += len(value)
        if self.limits and self.size > self.largest:
            refuse(f"is larger than {self.limit}, {self.largest} bytes")
        if value is None or isinstance(value, bool | float | str | bytes):
            return value
        if isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                refuse("must lie between -2**63 and 2**64 - 1", at)
            return value
        if not isinstance(value, dict | list | tuple):
            refuse(value.why if isinstance(value, Bad) else f"must be plain data, not {_kind(value)}", at)
        if depth > self.deepest:
            refuse(f"is nested deeper than max_nesting, {self.deepest}")
        if not isinstance(value, dict):
            return [self.copy(item, f"{at}[{i}]", depth + 1) for i, item in enumerate(value)]
        result = {}
        for key, item in value.items():
            if not isinstance(key, str):
                refuse(f"key {str(key)[:32]} must be a string, not {type(key).__name__}", at)
            self.size += _utf8_size(key, at)
            result[str(key)] = self.copy(item, f"{at}.{key[:64]}", depth + 1)
        return result


def _utf8_size(text: str, at: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        refuse("must be text that UTF-8 can hold", at)


def _kind(value: Any) -> str:
    return "an array" if isinstance(value, BlobRef | np.ndarray) else type(value).__name__


Opaque = Annotated[dict[str, Any], OpaqueSpec()]
ChatMap = Annotated[dict[str, Any], OpaqueSpec("max_chat")]
"""A chat message or the JSON schema of a tool: opaque here, and read where it is rendered."""

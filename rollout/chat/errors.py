"""The one error of this package."""

from __future__ import annotations

from protocols.errors import BadRequest
from protocols.scalars import Scope


class ChatError(BadRequest):
    """These messages cannot become ids. The message says why; field: what is to blame, a path below the group."""

    def __init__(self, message: str, field: str = "messages", *, scope: Scope | None = None) -> None:
        super().__init__(message, field=field, scope=scope)

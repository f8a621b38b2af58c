"""The one error that neither side of the wire can send."""

from protocols.errors import RolloutError


class ClientClosed(RolloutError):
    """The client (or the batch) was closed, or belongs to the process that this one was forked from."""

    code = "client_closed"

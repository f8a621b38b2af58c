"""The errors that neither side of the wire can send."""

from protocols.errors import RolloutError


class ClientClosed(RolloutError):
    """The client (or the batch) was closed, or belongs to the process that this one was forked from."""

    code = "client_closed"


class NotInstalled(RolloutError, ImportError):
    """The call needs a package that a client alone is installed without. The message says how to get it."""

    code = "not_installed"

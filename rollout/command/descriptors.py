"""Room for connections and for what environments open."""

from __future__ import annotations

import contextlib
import resource


def lift_limit() -> int:
    """Allow this process as many open files as it may have, and return how many; most systems begin with 1024.

    At the limit libzmq accepts no further client, and a tool can start no process. An environment that needs a lower
    limit (for `select`, which knows no descriptor above 1023) sets it in its own process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems name a hard limit that they do not allow.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

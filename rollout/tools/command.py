"""A program as a tool's own means: bounded in time and output, nothing to read, nobody left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from rollout.environments.errors import NoProcess

LIMIT = 65_536
"""Bytes of output."""
REFUSED: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""What the system answers where it has no room for one more process."""


async def command(
    *arguments: str, limit: int = LIMIT, cwd: str | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run a program and return what it prints (both streams), with its exit code where that is not 0.

    Its standard input is empty. It gets a session of its own, and that is killed, children included, when nobody holds
    its output any more, when more than `limit` bytes were printed, and when the caller is cancelled, as a tool is at
    its deadline. For `async def` tools: a `def` tool may use `subprocess`, for it runs in a process that is killed
    whole. Raises OSError where there is no such program, NoProcess where the system refuses one more process: that ends
    the trajectory, for it is no result of the tool.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=cwd,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as error:
        if error.errno in REFUSED:
            raise NoProcess(f"the system refuses a process: {error}") from error
        raise
    assert process.stdout is not None
    printed = bytearray()
    try:
        while len(printed) <= limit and (chunk := await process.stdout.read(4096)):
            printed += chunk
        if len(printed) > limit:
            return f"{_decoded(printed[:limit])}\n[cut: it printed more than {limit} bytes and was ended]"
        code = await process.wait()
        return _decoded(printed) + (f"\n[exit code {code}]" if code else "")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # Its pipe first: one that was paused, as that of a program which prints faster than it is read, never comes to
        # its end, and `wait` waits for that too.
        transport = process._transport  # type: ignore[attr-defined]
        transport.get_pipe_transport(1).close()
        await asyncio.shield(process.wait())
        transport.close()


def _decoded(printed: bytes | bytearray) -> str:
    return bytes(printed).decode(errors="replace")

"""Where processes for foreign code come from: one fresh interpreter that has imported what all of them need, and forks.

A fork of it takes milliseconds where a new interpreter takes a second. It runs no foreign code and no thread of ours,
and inherits nothing of the worker's but one socket, so its forks do not either.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

from rollout.environments.warden import fork
from rollout.environments.warden import main as become_warden

PRELOADED: Final = ("rollout.environments.host", "rollout.environments.isolated")


class Nursery:
    """Our side of it. It ends when this object is closed, or our process ends; its children do not end with it."""

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        """inherited: descriptors that all processes have, under the same numbers. Raises OSError."""
        self._control, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        code = f"from rollout.environments.nursery import main; main({theirs.fileno()})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", code],
                pass_fds=(theirs.fileno(), *inherited),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # a terminal signals its whole group
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(self, lifeline: int, connection: int, output: int) -> None:
        """One more process, which gets these descriptors. Raises OSError."""
        socket.send_fds(self._control, [b"start"], [lifeline, connection, output])

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()


def main(control: int) -> NoReturn:
    """control: our end of the socket over which `Nursery.start` sends descriptors."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are buried at once
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()  # a collection would copy every page
    connection = socket.socket(fileno=control)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 64, 3)
        if not message:
            os._exit(0)
        if descriptors and fork(descriptors[0]) == 0:
            _become_warden(connection, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become_warden(control: socket.socket, descriptors: list[int]) -> NoReturn:
    with suppress(BaseException):
        control.close()
        lifeline, connection, output = descriptors
        os.setsid()
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
        if (numpy_random := sys.modules.get("numpy.random")) is not None:
            numpy_random.seed()  # or all would draw the same numbers; Python's own generator sees to that itself
        become_warden(lifeline, connection)
    os._exit(1)

"""The outer of the two processes behind a `Process`: it starts the inner one, which runs foreign code, and cleans up.

What foreign code starts may have a process group or session of its own, or have lost its parent. The outer process
is therefore the one that orphans fall to: when the inner one ends, or whoever holds the other end of `lifeline` is
gone, everything that descends from it is killed. Imports little, for it stays in memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

PID: Final = "pid"
CODE: Final = "code"
"""What the first words of lines on the lifeline say of the rest. Any other line is why there is no process."""
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
NICENESS: Final = 5
"""Foreign code gives way to the engine and the event loop where the processors are not enough for all."""
FIRST_TO_GO: Final = 1000
"""Where memory is short the system ends foreign code and what it started, and not the worker."""
PAUSE_MS: Final = 10


def main(lifeline: int, connection: int) -> NoReturn:
    """lifeline: its end, or rather the end of whoever holds the other one, ends everything here.

    connection: for the inner process (rollout/environments/host.py). Written into `lifeline`, as lines: our process id,
    and its exit code (negative: the signal that killed it).
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _adopt_orphans()
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)  # foreign code may stop us, and nobody else would set us going again
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    warden = os.getpid()
    say(lifeline, f"{PID} {warden}")
    inner = fork(lifeline)
    if inner == 0:
        _become_host(warden, lifeline, connection, (woken, wake))
    if inner is None:
        os._exit(1)
    os.close(connection)
    watched = select.poll()
    watched.register(lifeline, select.POLLIN)
    watched.register(woken, select.POLLIN)
    code: int | None = None
    while code is None:
        if any(end == lifeline for end, _ in watched.poll()):
            break  # nothing is ever sent to us: this is its end
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        code = _reap(inner)
    if code is not None:
        say(lifeline, f"{CODE} {code}")
    _kill_all(inner)
    os._exit(0)


def say(lifeline: int, line: str) -> None:
    with suppress(OSError):
        os.write(lifeline, f"{line}\n".encode())


def fork(lifeline: int) -> int | None:
    """As `os.fork`. None where the system refuses it, which the lifeline is told."""
    try:
        return os.fork()
    except OSError as error:
        say(lifeline, f"it cannot be forked: {error}")
        return None


def _become_host(warden: int, lifeline: int, connection: int, ends: tuple[int, int]) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (lifeline, *ends):
            os.close(end)
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != warden:
            os._exit(1)
        os.nice(NICENESS)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(FIRST_TO_GO))
        _adopt_orphans()  # so that a call can be asked whether it left children
        from rollout.environments.host import main

        main(connection)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _reap(inner: int) -> int | None:
    """Bury whoever is dead. The exit code of `inner` if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == inner:
                code = os.waitstatus_to_exitcode(status)
    return code


def _kill_all(inner: int) -> None:
    """Who dies leaves its children to us: in a few rounds nobody is left."""
    with suppress(OSError):
        os.killpg(inner, signal.SIGKILL)
    while True:
        for pid in children():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        select.select([], [], [], PAUSE_MS / 1000)


def children() -> list[int]:
    """Processes that this one has started or adopted and that still run."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += [int(pid) for pid in (task / "children").read_text().split()]
        except FileNotFoundError:
            if task.exists():
                return _children_of(os.getpid())  # this kernel keeps no such lists
    return [pid for pid in found if not _is_dead(pid)]


def _children_of(parent: int) -> list[int]:
    """By a look at every process."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if (state := _state(pid)) is not None and state[1] == str(parent)]


def _is_dead(pid: int) -> bool:
    """Gone, or ended and not yet asked how."""
    return _state(pid) is None


def _state(pid: int) -> list[str] | None:
    """State, parent and so on; None of a process that is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields


def _adopt_orphans() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

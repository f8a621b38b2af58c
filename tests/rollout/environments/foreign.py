"""Functions that tests call in processes of their own: what foreign code may do."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np


def add(a: Any, b: Any) -> Any:
    return a + b


async def later(seconds: float, value: Any) -> Any:
    await asyncio.sleep(seconds)
    return value


def pid(*_: Any) -> int:
    return os.getpid()


def fail(error: BaseException) -> NoReturn:
    raise error


def leave(code: int) -> NoReturn:
    os._exit(code)


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def read_nowhere() -> None:
    print("x" * 10_000, "last words", flush=True)
    ctypes.string_at(0)


def kill_parent() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def stop_parent(note: str) -> None:
    """Who watches over it is stopped, and it goes on."""
    os.kill(os.getppid(), signal.SIGSTOP)
    Path(note).write_text(str(os.getpid()))
    time.sleep(600)


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def draw(seconds: float) -> tuple[float, float]:
    time.sleep(seconds)
    return random.random(), float(np.random.random())


def burn() -> NoReturn:
    while True:
        pass


def stubborn() -> NoReturn:
    while True:
        try:
            while True:
                time.sleep(0.01)
        except BaseException:
            continue


def print_for_ever() -> NoReturn:
    while True:
        print("x" * 10_000, flush=True)


def read_stdin() -> str:
    return sys.stdin.read()


def array(size: int) -> Any:
    return {"ids": np.arange(size, dtype=np.int32), "reward": np.float32(0.5), "nested": [(1, "ä"), {2.5, None}, b"x"]}


def large(size: int) -> bytes:
    return bytes(size)


class Own:
    """Not to be had outside of its process."""


def own() -> Own:
    return Own()


def unpicklable() -> Any:
    return threading.Lock()


def unprintable() -> NoReturn:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    raise Unprintable


def start_child(folder: str, *, session: bool = False, wait: bool = True, ignore: bool = False) -> int:
    """A child that ignores what can be ignored, with a child of its own; both write their ids into `folder`."""
    trap = "trap '' TERM INT HUP; " if ignore else ""
    script = f"{trap}echo $$ > {folder}/child; (echo $BASHPID > {folder}/grandchild; exec sleep 600) & sleep 600"
    child = subprocess.Popen(["bash", "-c", script], start_new_session=session)
    while not all((Path(folder) / name).exists() for name in ("child", "grandchild")):
        time.sleep(0.005)
    return child.wait() if wait else child.pid


def orphan(folder: str) -> None:
    """A daemon: its parent is gone, its session its own."""
    script = f"(setsid sh -c 'echo $$ > {folder}/child; echo $$ > {folder}/grandchild; exec sleep 600' &) ; exit 0"
    subprocess.run(["bash", "-c", script], check=True)
    while not (Path(folder) / "grandchild").exists():
        time.sleep(0.005)


def open_descriptors() -> dict[str, str]:
    return {entry.name: os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}


def standing() -> tuple[int, int]:
    """Niceness and how soon it is ended where memory is short, both as what it starts has them."""
    said = subprocess.run(
        ["sh", "-c", "nice; cat /proc/self/oom_score_adj"], capture_output=True, text=True, check=True
    )
    nice, score = said.stdout.split()
    return int(nice), int(score)


def read_shared(shared: Any) -> Any:
    return shared.get()


def modules() -> list[str]:
    return sorted(sys.modules)


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, more: int) -> int:
        self.value += more
        return self.value

"""Errors of foreign code as text: they may be of any class, and raise when they are looked at."""

from __future__ import annotations

import traceback


class SpeaksForItself(Exception):
    """Its text says all: the name of its class is not put before it."""


class Reported(SpeaksForItself):
    """What a function raised in another process. The text names the error; a note holds the traceback there."""


class ProcessDied(SpeaksForItself):
    """The process ended, or was ended, before it answered; the message says which and how."""

    def __init__(self, process: str, how: str) -> None:
        super().__init__(f"{process}: {how}")
        self.how = how


class NotImported(SpeaksForItself):
    """What was to run in a process cannot be imported there, though it can here: no fault of the call."""


class NoProcess(SpeaksForItself):
    """There was no process, or thread, to run foreign code in: for too long all were busy, or the system gave none.

    A fault of the worker and no other: it ends the trajectory, and no model reads of it.
    """


def describe(error: BaseException) -> str:
    """The name of its class and what it says."""
    try:
        return str(error) if isinstance(error, SpeaksForItself) else f"{type(error).__name__}: {error}"
    except BaseException:
        return f"{type(error).__name__} (it cannot be printed)"


def details(error: BaseException) -> str:
    """Its traceback, or nothing where that says nothing more or cannot be had."""
    try:
        return "" if isinstance(error, SpeaksForItself) else "".join(traceback.format_exception(error))
    except BaseException:
        return ""

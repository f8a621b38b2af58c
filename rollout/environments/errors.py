"""Errors of foreign code as text: they may be of any class, and raise when they are looked at."""

from __future__ import annotations

import traceback


class SpeaksForItself(Exception):
    """Its text says all: the name of its class is not put before it."""


class Reported(SpeaksForItself):
    """What a function raised in another process. The text names the error; a note holds the traceback there."""


class ProcessDied(SpeaksForItself):
    """The process ended, or was ended, before it answered; the message says how."""


class NoProcess(SpeaksForItself):
    """All processes were busy for too long. No fault of what was to run in one: the worker has too few."""


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

"""A client's call, written once for both faces.

Its body is a procedure (see waiting.py). On a `Blocking` client the call returns when that has ended; on an `Awaiting`
one it is a coroutine.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from rollout.client.waiting import Steps, arun, fail, run

P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """The face whose calls return when they have ended."""

    @staticmethod
    def _work(work: Callable[[], T], unwanted: Callable[[T], None]) -> Future[T]:  # noqa: ARG004
        """What takes long and waits for nobody, for a procedure to yield: done here and now."""
        future: Future[T] = Future()
        future.set_result(work())
        return future


class Awaiting:
    """The face whose calls are coroutines."""

    @staticmethod
    def _work(work: Callable[[], T], unwanted: Callable[[T], None]) -> Future[T]:
        """Done on another thread. unwanted: given the result when nobody waits for it any more."""
        future: Future[T] = Future()

        def go() -> None:
            try:
                result = work()
            except BaseException as error:
                fail(future, error)
                return
            try:
                future.set_result(result)
            except InvalidStateError:
                unwanted(result)

        threading.Thread(target=go, name="rollout-client work").start()
        return future


class Call(Generic[P, T]):
    """Decorates a procedure that is a method. Seen from a class that is neither face, it is the procedure itself."""

    def __init__(self, procedure: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        self._procedure = procedure

        @wraps(procedure)
        def blocking(client: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            return run(procedure(client, *args, **kwargs))

        @wraps(procedure)
        async def awaited(client: Any, *args: P.args, **kwargs: P.kwargs) -> T:
            return await arun(procedure(client, *args, **kwargs))

        self._blocking = _shown(blocking)
        self._awaited = _shown(awaited)

    @overload
    def __get__(self, client: Blocking, face: type[Any]) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: Awaiting, face: type[Any]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: None, face: type[Any]) -> Callable[Concatenate[Any, P], Steps[T]]: ...
    def __get__(self, client: Any, face: type[Any]) -> Callable[..., Any]:
        function = self._procedure
        if issubclass(face, Blocking):
            function = self._blocking
        elif issubclass(face, Awaiting):
            function = self._awaited
        return function if client is None else MethodType(function, client)


def _shown(function: Any) -> Callable[..., Any]:
    """With the signature that `help` is to show: what is returned is not the procedure."""
    signature = inspect.signature(function)
    returned = signature.return_annotation.removeprefix("Steps[").removesuffix("]")
    function.__signature__ = signature.replace(return_annotation=returned)
    shown: Callable[..., Any] = function
    return shown

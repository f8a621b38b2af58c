from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.engine.host import Host


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def lazy(request: pytest.FixtureRequest) -> bool:
    """Both ends of when a device may do its work."""
    return bool(request.param)


@pytest.fixture
def make_host(lazy: bool) -> Iterator[Callable[..., Host]]:
    """Makes hosts with `lazy` set, and sees to it that each is empty when the test is over."""
    hosts: list[Host] = []

    def make(**options: Any) -> Host:
        hosts.append(Host(lazy=lazy, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.check_empty()


@pytest.fixture
def make_bare_host(lazy: bool) -> Callable[..., Host]:
    """The same without the last look: for engines that are broken on purpose."""
    return partial(Host, lazy=lazy)

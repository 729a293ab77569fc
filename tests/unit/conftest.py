"""What unit tests share."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.unit.virtual_time import VirtualTime

settings.register_profile("long", max_examples=10_000)  # pytest tests/unit -k fuzz --hypothesis-profile=long


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run each `async def` test on a loop of its own; what that loop would only log is a failure, too."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    logged: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        async with asyncio.timeout(60):
            await pyfuncitem.obj(**arguments)

    asyncio.run(bounded())
    assert not logged
    return True


@pytest.fixture
def virtual() -> Iterator[VirtualTime]:
    """A clock that jumps; no task may be left at the end."""
    virtual = VirtualTime()
    yield virtual
    assert not virtual.close()

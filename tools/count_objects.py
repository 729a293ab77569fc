"""Counts what stands between a request and its first token: objects of our own classes, and queues that it crosses.

A server with the demo model runs in this process, with its stages in worker processes; one chat warms it up, another
one is counted from its POST to its first token. Classes count that are defined in `coordinator` or `worker`, wherever
in the coordinator's process they are created. Run it in any checkout:

    python -m tools.count_objects            # or: python /path/to/tools/count_objects.py, in the folder of a checkout
"""

import asyncio
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import queue
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

_CHAT = {"messages": [{"role": "user", "content": "Tell me of a fox."}], "max_tokens": 8, "stream": True}
_PORT = 9471
_ROOMS = ("coordinator.", "worker.")


class Counted:
    """Instances by class and items by queue, while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.instances: Counter[str] = Counter()
        self.puts: dict[int, Counter[str]] = {}
        self._seen: set[int] = set()

    def watch_classes(self) -> None:
        """Have every class of ours tell of its instances."""
        for kind in list(_classes()):
            name = f"{kind.__module__}.{kind.__qualname__}"
            method = "__new__" if issubclass(kind, tuple) else "__init__"
            made: Callable[..., Any] = getattr(kind, method)

            @functools.wraps(made)
            def noted(
                first: Any, *given: Any, _made: Any = made, _kind: type = kind, _name: str = name, **named: Any
            ) -> Any:
                if self.is_on and (first is _kind or type(first) is _kind):
                    self.instances[_name] += 1
                return _made(first, *given, **named)

            with contextlib.suppress(TypeError, AttributeError):
                setattr(kind, method, staticmethod(noted) if method == "__new__" else noted)

    def models_since(self, before: set[int]) -> None:
        """Add what pydantic made without calling any `__init__`."""
        from pydantic import BaseModel

        for each in gc.get_objects():
            kind = type(each)
            if id(each) not in before and issubclass(kind, BaseModel) and kind.__module__.startswith(_ROOMS):
                name = f"{kind.__module__}.{kind.__qualname__}"
                self.instances[name] = max(self.instances[name], 1)


def _classes() -> Iterator[type]:
    for package in ("worker", "coordinator"):
        root = importlib.import_module(package)
        for found in pkgutil.walk_packages(root.__path__, f"{package}."):
            if found.name.endswith("__main__"):
                continue
            with contextlib.suppress(ImportError):
                importlib.import_module(found.name)
    for name, module in list(sys.modules.items()):
        if name.startswith(_ROOMS):
            for kind in vars(module).values():
                is_ours = isinstance(kind, type) and kind.__module__ == name
                if is_ours and not (issubclass(kind, (Enum, BaseException)) or getattr(kind, "_is_protocol", False)):
                    yield kind


class Crossed:
    """Queues through which an item goes that has to do with a token, by where they are put into."""

    def __init__(self, counted: Counted) -> None:
        self.places: Counter[str] = Counter()
        for kind, method in ((asyncio.Queue, "put_nowait"), (queue.SimpleQueue, "put")):
            self._watch(kind, method, counted)

    def _watch(self, kind: Any, method: str, counted: Counted) -> None:
        made = getattr(kind, method)

        def noted(each: Any, *given: Any, **named: Any) -> Any:
            if counted.is_on:
                frame = sys._getframe(1)
                while frame.f_back and not frame.f_globals.get("__name__", "").startswith(_ROOMS):
                    frame = frame.f_back
                self.places[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1
            return made(each, *given, **named)

        with contextlib.suppress(TypeError):  # one that is written in C
            setattr(kind, method, noted)


async def _chat(on_first: Callable[[], None] = lambda: None, on_post: Callable[[], None] = lambda: None) -> None:
    """One streamed chat, by a plain socket: no client's objects are in the way."""
    reader, writer = await asyncio.open_connection("127.0.0.1", _PORT)
    body = json.dumps(_CHAT).encode()
    on_post()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    has_token = False
    while line := await reader.readline():
        if not has_token and b'"content":"' in line and b'"content":""' not in line:
            has_token = True
            on_first()
    writer.close()
    assert has_token, "the server gave no token"


async def _count(counted: Counted, serving: "asyncio.Task[Any]") -> None:
    for _ in range(600):
        await asyncio.sleep(0.1)
        with contextlib.suppress(OSError, AssertionError):
            await _chat()
            break
        if serving.done():
            serving.result()
    await asyncio.sleep(0.5)
    before: set[int] = set()

    def begin() -> None:
        gc.collect()
        gc.disable()
        before.update(map(id, gc.get_objects()))
        counted.is_on = True

    def end() -> None:
        counted.is_on = False
        counted.models_since(before)
        gc.enable()

    await _chat(end, begin)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def _start() -> Any:
    """Return the coroutine of this checkout's server."""
    from coordinator.api.serve import ServeOptions, serve
    from coordinator.cluster.options import cluster_options

    return serve(cluster_options(None, "demo", 1), ServeOptions(host="127.0.0.1", port=_PORT))


def main() -> None:
    """Print a table of classes and one of queues."""
    sys.path.insert(0, os.getcwd())
    counted = Counted()
    counted.watch_classes()
    crossed = Crossed(counted)

    async def run() -> None:
        await _count(counted, asyncio.create_task(_start()))

    asyncio.run(run())
    for title, found in (
        ("instances of our classes, from POST to first token", counted.instances),
        ("queue", crossed.places),
    ):
        by_room = Counter[str]()
        for name, count in found.items():
            by_room[".".join(name.split(".")[:2])] += count
        print(f"\n{title}: {found.total()} ({', '.join(f'{room} {count}' for room, count in sorted(by_room.items()))})")
        for name, count in sorted(found.items(), key=lambda pair: (-pair[1], pair[0])):
            print(f"  {count:4d}  {name}")


if __name__ == "__main__":
    main()

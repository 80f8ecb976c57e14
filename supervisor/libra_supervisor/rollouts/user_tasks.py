"""Tasks that workflows start: what leaves the process in one of them is an error like any other.

The event loop ends at a SystemExit in any task, whoever awaits it.
"""

import asyncio
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from libra.user_code import error_in_words

T = TypeVar("T")

_IS_USERS: ContextVar[bool] = ContextVar("libra_is_users_code", default=False)


class UserExitError(Exception):
    """User code wanted to leave the process."""


@contextmanager
def users_code() -> Iterator[None]:
    """Tasks that are created within the block, and by such tasks, are contained."""
    before = _IS_USERS.set(True)
    try:
        yield
    finally:
        _IS_USERS.reset(before)


def contain_exits() -> None:
    """Have the running event loop make the tasks of `users_code` contained."""
    asyncio.get_running_loop().set_task_factory(_task)


def _task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(_Contained(coro) if _IS_USERS.get() else coro, loop=loop, **options)


class _Contained(Coroutine[Any, Any, T]):
    """A coroutine that fails where it would have left the process."""

    def __init__(self, coro: Coroutine[Any, Any, T]) -> None:
        self._coro = coro

    def send(self, value: Any) -> Any:
        try:
            return self._coro.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise UserExitError(error_in_words(error)) from error

    def throw(self, typ: Any, val: object = None, tb: TracebackType | None = None) -> Any:  # noqa: ARG002 - its base has it
        try:
            return self._coro.throw(val if isinstance(val, BaseException) else typ)
        except (SystemExit, KeyboardInterrupt) as error:
            raise UserExitError(error_in_words(error)) from error

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coro.__await__()

    def __getattr__(self, name: str) -> Any:
        # anyio asks for the state of a task's coroutine.
        return getattr(self._coro, name)

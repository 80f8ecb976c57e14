"""The process group of a weight transfer, apart from torch's default group, and its signals.

A TCP store at trainer rank 0 holds what the members tell each other beside the data. Every wait
looks at it, so that whoever fails frees all others: it sets `abort`, or it was rank 0 and the
store is gone.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed

from libra import clock
from libra.transfer.outcome import TransferAbortedError

# What is used here is there in every torch, but not in its type stubs.
dist: Any = torch.distributed

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT = timedelta(seconds=10)
FORM_TIMEOUT_S = 30.0
"""To connect to each other once all are there."""

POLL_S = 0.01
WORK_POLL_S = 0.0005
SIGNALS_EVERY_S = 0.2
LONGEST = timedelta(days=1)
"""Given to NCCL's own watchdog, which would end the process: our waits are the shorter ones."""

Beat = Callable[[], None]
"""Called while waiting, several times a second."""


def open_store(host: str = LOOPBACK) -> tuple[Any, int]:
    """Listen with a store on `host`, a name or address of this machine; returns it and its port."""
    # Bound here and handed over, so that the port is ours before anybody is told its number, and
    # on this address alone: on loopback nobody from outside can reach it.
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_store(host: str, port: int) -> Any:
    """Reach rank 0's store. Raises TransferAbortedError when it is not there."""
    try:
        return dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT
        )
    except RuntimeError as error:
        raise TransferAbortedError(
            f"the trainer's store does not answer: {_first(error)}"
        ) from error


def own_address(host: str, port: int) -> str:
    """The address of this machine from which `host` is reached. Raises TransferAbortedError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, kind, protocol) as probe:
            # The kernel looks up the way; nothing is sent.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransferAbortedError(f"no way to the trainer at {host}: {error}") from error


class Signals:
    """What the members of one group tell each other."""

    def __init__(self, store: Any, group_id: str) -> None:
        self.store = dist.PrefixStore(group_id, store)

    def count(self, name: str, *, more: int = 0) -> int:
        """Add `more` to a counter; returns what it is then."""
        with _mapped():
            return int(self.store.add(name, more))

    def say(self, name: str, value: str) -> None:
        with _mapped():
            self.store.set(name, value)

    def heard(self, name: str) -> str | None:
        """What was said under `name`, or None."""
        with _mapped():
            return self.store.get(name).decode() if self.store.check([name]) else None

    def check(self) -> None:
        """Raise TransferAbortedError when a member has given up, or rank 0 is gone."""
        if (reason := self.heard("abort")) is not None:
            raise TransferAbortedError(reason)

    def abort(self, reason: str) -> None:
        """Have every member's wait end; says nothing when rank 0 is gone anyway."""
        with suppress(TransferAbortedError):
            if self.heard("abort") is None:
                self.say("abort", reason)

    def wait(self, is_done: Callable[[], bool], *, timeout_s: float, what: str, beat: Beat) -> None:
        """Raise TransferAbortedError on an abort, or after `timeout_s`."""
        deadline = clock.monotonic() + timeout_s
        while not is_done():
            self.check()
            beat()
            if clock.monotonic() >= deadline:
                raise TransferAbortedError(f"{what} took more than {timeout_s:g} s")
            time.sleep(POLL_S)


class Group:
    """One member's end of the group. It ends with the first error; never use it afterwards."""

    def __init__(self, backend: Any, signals: Signals) -> None:
        self._backend = backend
        self._under_way: list[Any] = []
        self.signals = signals

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send from rank 0, or to receive into `tensor`; returns what `wait` takes."""
        self._under_way = [work for work in self._under_way if not work.is_completed()]
        work = self._backend.broadcast([tensor], _from_rank_0())
        self._under_way.append(work)
        return work

    def wait(self, work: Any, *, stall_s: float, beat: Beat) -> None:
        """Return when `work` is done. Raises TransferAbortedError."""
        began_at = looked_at = clock.monotonic()
        while not work.is_completed():
            now = clock.monotonic()
            if now - looked_at >= SIGNALS_EVERY_S:
                looked_at = now
                self.signals.check()
                beat()
            if now - began_at >= stall_s:
                raise TransferAbortedError(f"nothing came through for {stall_s:g} s")
            time.sleep(WORK_POLL_S)
        try:
            # Does not wait any more: it raises what went wrong, and orders the device's streams.
            work.wait()
        except RuntimeError as error:
            raise TransferAbortedError(f"a member's connection broke: {_first(error)}") from error

    def close(self) -> None:
        """Break the connections, so that peers that still wait for us do not."""
        backend, self._backend = self._backend, None
        if backend is not None:
            _leave(backend, self._under_way)


def _leave(backend: Any, under_way: list[Any]) -> None:
    _LEFT[:] = [it for it in _LEFT if not all(work.is_completed() for work in it[1])]
    _LEFT.append((backend, under_way))
    threading.Thread(target=_abort, args=(backend,), daemon=True).start()


_LEFT: list[tuple[Any, list[Any]]] = []
"""Backends with what was under way when they were left. To delete one waits for that, up to its
timeout, and holds the interpreter's lock meanwhile: so it is done when nothing is under way."""


class Place(NamedTuple):
    """Where a member stands in its group."""

    rank: int
    world_size: int
    device: torch.device
    host: str = LOOPBACK
    """Where this member's gloo listens; NCCL finds its interfaces itself."""


def join(signals: Signals, place: Place, *, timeout_s: float, stall_s: float, beat: Beat) -> Group:
    """Wait for all members, then connect to them. Raises TransferAbortedError, at every member."""
    try:
        signals.count("joined", more=1)
        signals.wait(
            lambda: signals.count("joined") >= place.world_size,
            timeout_s=timeout_s,
            what="coming together for a transfer",
            beat=beat,
        )
        return Group(_connected(signals, place, stall_s=stall_s, beat=beat), signals)
    except BaseException as error:
        signals.abort(f"rank {place.rank} could not join: {error}")
        raise


def _connected(signals: Signals, place: Place, *, stall_s: float, beat: Beat) -> Any:
    """Connect in a thread: while a member that died is waited for, nothing in torch or NCCL ends.

    Given up, the thread is left where it is.
    """
    # A store of its own, since a wait in one lets nobody else look at it.
    store = dist.PrefixStore("group", signals.store.clone())
    store.set_timeout(timedelta(seconds=FORM_TIMEOUT_S))
    is_given_up = threading.Event()
    connect = partial(_nccl, is_given_up) if place.device.type == "cuda" else _gloo
    result: list[Any] = []

    def connect_now() -> None:
        try:
            result.append(connect(store, place, stall_s))
        except RuntimeError as error:
            result.append(error)

    threading.Thread(target=connect_now, daemon=True).start()
    try:
        signals.wait(
            lambda: bool(result),
            timeout_s=FORM_TIMEOUT_S,
            what="connecting to all members of a transfer",
            beat=beat,
        )
    except BaseException:
        is_given_up.set()
        raise
    if isinstance(error := result[0], RuntimeError):
        raise TransferAbortedError(f"the group was not formed: {_first(error)}") from error
    return result[0]


def _gloo(store: Any, place: Place, stall_s: float) -> Any:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - the only way to choose the interface
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=place.host)]  # noqa: SLF001
    options._timeout = timedelta(seconds=stall_s)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - broadcasts are one after another
    return dist.ProcessGroupGloo(store, place.rank, place.world_size, options)


def _nccl(is_given_up: threading.Event, store: Any, place: Place, stall_s: float) -> Any:
    del stall_s  # our own waits keep it
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = LONGEST  # noqa: SLF001
    # Read once, here: an error of this group must not end the process, or training would end with
    # it. The value of the other groups stays.
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)  # noqa: TID251 - NCCL's only way to be told
    os.environ[name] = "0"  # noqa: TID251
    try:
        backend = dist.ProcessGroupNCCL(store, place.rank, place.world_size, options)
        backend.eager_connect_single_device(place.device)
        _first_broadcast(backend, place.device, is_given_up)
    finally:
        if before is None:
            del os.environ[name]  # noqa: TID251
        else:
            os.environ[name] = before  # noqa: TID251
    return backend


def _first_broadcast(backend: Any, device: torch.device, is_given_up: threading.Event) -> None:
    """Have NCCL connect the members now. Raises RuntimeError when nobody waits for it any more.

    It leaves this to the first collective, which does not return while a member stands still, and
    whoever called it hears of no abort. What waits on the device until then would hold up whoever
    waits for the device.
    """
    work = backend.broadcast([torch.zeros(1, device=device)], _from_rank_0())
    while not work.is_completed():
        if is_given_up.wait(POLL_S):
            _leave(backend, [work])
            raise RuntimeError("given up")


def _from_rank_0() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _abort(backend: Any) -> None:
    with suppress(RuntimeError):
        backend.abort()


@contextmanager
def _mapped() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransferAbortedError(f"the trainer is gone: {_first(error)}") from error


def _first(error: Exception) -> str:
    return str(error).splitlines()[0][:200]

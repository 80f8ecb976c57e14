import os
import socket
import threading

import anyio
import pytest
import trio.testing

from libra_supervisor import notify
from libra_supervisor.notify import Notifier, start_extended


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Manager(socket.socket):
    path = ""


@pytest.fixture
def receiver(tmp_path):
    with Manager(socket.AF_UNIX, socket.SOCK_DGRAM) as it:
        it.path = str(tmp_path / "notify")
        it.bind(it.path)
        it.setblocking(False)
        yield it


def received(receiver):
    messages = []
    while True:
        try:
            messages.append(receiver.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_states_arrive_as_systemd_wants_them(receiver):
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": receiver.path})
    notifier.extend_start(30)
    notifier.ready("2 servers,\n training")
    notifier.status("step 3")
    notifier.stopping("saving")
    assert received(receiver) == [
        "EXTEND_TIMEOUT_USEC=30000000",
        "READY=1\nSTATUS=2 servers, training",
        "STATUS=step 3",
        "STOPPING=1\nSTATUS=saving",
    ]


@pytest.mark.case("R-B77")
def test_a_start_that_blocks_asks_for_more_time_until_it_is_over(receiver, monkeypatch):
    monkeypatch.setattr(notify, "_EXTENSION_PERIOD_S", 0.01)
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": receiver.path})
    receiver.settimeout(10)
    with start_extended(notifier, at_most_s=1000):
        for _ in range(3):
            assert receiver.recv(100) == b"EXTEND_TIMEOUT_USEC=60000000"
    receiver.setblocking(False)
    received(receiver)
    assert [thread.name for thread in threading.enumerate() if "extension" in thread.name] == []


@pytest.mark.case("R-B77")
def test_a_start_that_hangs_is_not_extended_for_ever(receiver, monkeypatch):
    monkeypatch.setattr(notify, "_EXTENSION_PERIOD_S", 0.01)
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": receiver.path})
    with start_extended(notifier, at_most_s=0.03):
        (thread,) = (it for it in threading.enumerate() if it.name == "start-extension")
        thread.join(10)
        assert not thread.is_alive()
    assert len(received(receiver)) == 3


def test_an_abstract_address_is_understood():
    name = f"\0libra-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as it:
        it.bind(name)
        Notifier.from_environment({"NOTIFY_SOCKET": "@" + name[1:]}).ping()
        assert it.recv(100) == b"WATCHDOG=1"


def test_without_a_manager_or_with_a_dead_one_nothing_happens(tmp_path):
    Notifier.from_environment({}).ready("x")
    Notifier.from_environment({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("x")


@pytest.mark.case("R-B77")
@pytest.mark.anyio
async def test_the_watchdog_is_fed_more_than_twice_per_timeout(receiver):
    environ = {"NOTIFY_SOCKET": receiver.path, "WATCHDOG_USEC": "3000000"}
    with anyio.move_on_after(9.5):
        await Notifier.from_environment(environ).keep_alive()
    assert received(receiver) == ["WATCHDOG=1"] * 10


@pytest.mark.case("R-B78")
def test_a_watchdog_meant_for_another_process_is_not_ours():
    environ = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid() + 1)}
    assert Notifier.from_environment(environ).ping_period_s is None
    environ["WATCHDOG_PID"] = str(os.getpid())
    assert Notifier.from_environment(environ).ping_period_s == 1.0

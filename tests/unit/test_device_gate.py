"""Starts on a GPU whose memory is still in use, and what is asked of the driver for that."""

import json
import os
from pathlib import Path

import anyio
import pytest

from libra.errors import SiteError
from libra.ids import ChildId
from libra.wire.node import DeviceMemory
from libra_supervisor.app.device_gate import SLACK_BYTES, DeviceGate
from libra_supervisor.doctor.accelerators import device_memory, nearby_cores

GIB = 2**30
TOTAL = 140 * GIB
FAKE_DRIVER = Path(__file__).parents[1] / "support" / "fake_driver"


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Say how much of which device is in use."""
    path = tmp_path / "used.json"

    def set_used(**used_bytes):
        path.write_text(json.dumps({name[1:]: it for name, it in used_bytes.items()}))

    set_used()
    monkeypatch.syspath_prepend(FAKE_DRIVER)
    monkeypatch.setenv("FAKE_NVML", str(path))
    return set_used


class Devices:
    def __init__(self, **used_gib):
        self.used_gib = used_gib

    async def look(self):
        return tuple(
            DeviceMemory(
                device=it, used_bytes=self.used_gib[it] * GIB, total_bytes=TOTAL, pids=(7, 9)
            )
            for it in self.used_gib
        )


def gate_on(devices, *, needed_fraction=None):
    return DeviceGate(ChildId("vllm-0"), devices.look, needed_fraction=needed_fraction)


def hindrance(gate):
    return anyio.run(gate.hindrance)


@pytest.mark.case("R-B50")
def test_an_engine_waits_until_the_share_that_it_takes_is_free():
    devices = Devices(a=0, b=115)
    gate = gate_on(devices, needed_fraction=0.9)
    assert hindrance(gate) == (
        "waiting for GPU b: 115.0 of 140.0 GiB are in use (pid 7, 9), 126.0 GiB have to be free"
    )
    devices.used_gib["b"] = 14
    assert hindrance(gate) is None
    devices.used_gib["b"] = 15
    assert hindrance(gate) is not None, "the first byte too much"


@pytest.mark.case("R-B50")
def test_a_child_without_a_known_need_waits_for_what_was_free_before_its_first_start():
    devices = Devices(a=40)
    gate = gate_on(devices)
    assert hindrance(gate) is None, "what others use from the start on is theirs"
    devices.used_gib["a"] = 40 + SLACK_BYTES // GIB
    assert hindrance(gate) is None
    devices.used_gib["a"] += 1
    assert "GPU a: 43.0 of 140.0" in hindrance(gate)


def test_what_a_sleeping_engine_keeps_does_not_count_against_its_waking_up():
    devices = Devices(a=2)
    gate = gate_on(devices, needed_fraction=0.9)
    anyio.run(gate.note_kept)
    devices.used_gib["a"] = 16
    assert hindrance(gate) is None
    devices.used_gib["a"] = 17
    assert "124.0 GiB have to be free" in hindrance(gate)
    devices.used_gib["a"] = 16
    gate.forget_kept()
    assert "126.0 GiB have to be free" in hindrance(gate)


def test_an_engine_that_sleeps_where_the_driver_does_not_tell_is_woken_as_if_it_kept_nothing():
    async def no_look():
        raise SiteError("no driver")

    gate = DeviceGate(ChildId("vllm-0"), no_look, needed_fraction=0.9)
    anyio.run(gate.note_kept)
    assert hindrance(gate) is None


def test_where_the_driver_does_not_answer_nothing_waits_and_that_is_said_once(capsys):
    async def look():
        raise SiteError("no driver")

    gate = DeviceGate(ChildId("vllm-0"), look, needed_fraction=0.9)
    assert hindrance(gate) is None
    assert hindrance(gate) is None
    assert capsys.readouterr().out.count("device_memory_unknown") == 1


def test_devices_are_found_by_index_and_by_the_beginning_of_their_uuid(driver):
    driver(_1=5, _2=7)
    found = device_memory(("2", "GPU-11"))
    assert [(it.device, it.used_bytes, it.pids) for it in found] == [
        ("2", 7, (4711,)),
        ("GPU-11", 5, (4711,)),
    ]
    with pytest.raises(SiteError, match="Not Found: MIG-7"):
        device_memory(("MIG-7",))


def test_a_driver_that_is_not_loaded_is_an_error_of_the_site(driver, monkeypatch):
    monkeypatch.delenv("FAKE_NVML")
    with pytest.raises(SiteError, match="Driver Not Loaded"):
        device_memory(("0",))


def test_cores_beside_a_device_are_those_that_this_process_may_use(driver):
    allowed = os.sched_getaffinity(0)
    near = allowed & {1}
    assert nearby_cores("2") == (() if near == allowed else tuple(near))
    assert nearby_cores("3") == (), "all of them: nothing to bind to"

import anyio
import pytest
import trio.testing

from fleets import fleet_of, place, request, spec
from libra import clock
from libra.errors import (
    DrainingError,
    LibraError,
    OverloadedError,
    PeerError,
    RefusedError,
    RejectedError,
)
from libra.ids import InstanceId
from libra.tracing.chrome import read_trace
from libra.tracing.span import SpanWriter, trace_path
from libra_supervisor.gateway.waiting import SaturatedError, WaitingRoom

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


async def test_a_waiting_task_goes_on_when_a_place_is_given_back():
    scheduler = fleet_of(1, now=clock.now(), max_in_flight_per_instance=1)
    room, seen = WaitingRoom(scheduler), []

    async def one(name, work_s):
        async with room.place(request()) as placement:
            await clock.sleep(work_s)
            placement.complete(5)
        seen.append((name, clock.now() - began))

    began = clock.now()
    async with anyio.create_task_group() as tg:
        tg.start_soon(room.run)
        async with anyio.create_task_group() as users:
            for k in range(3):
                users.start_soon(one, k, 10.0)
                await trio.testing.wait_all_tasks_blocked()
        tg.cancel_scope.cancel()
    assert seen == [(0, 10.0), (1, 20.0), (2, 30.0)]
    assert scheduler.num_in_flight() == 0


async def test_the_trace_has_each_request_s_wait_and_its_time_on_the_instance(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(clock, "monotonic", clock.now)
    spans = SpanWriter(trace_path(tmp_path, -1), rank=-1, run_id="r", role="control")
    began = clock.now()
    scheduler = fleet_of(1, now=began, max_in_flight_per_instance=1, queue_deadline_s=15.0)
    room = WaitingRoom(scheduler, spans=spans)

    async def one():
        async with room.place(request()) as placement:
            await clock.sleep(10.0)
            placement.complete(5)

    async def turned_away():
        with pytest.raises(OverloadedError):
            await one()

    async with anyio.create_task_group() as tg:
        tg.start_soon(room.run)
        async with anyio.create_task_group() as users:
            for use in (one, one, turned_away):
                users.start_soon(use)
                await trio.testing.wait_all_tasks_blocked()
        tg.cancel_scope.cancel()
    spans.close()
    ((header, found),) = read_trace(trace_path(tmp_path, -1))
    said = [
        (s.phase, s.track, (s.at_ns - header.started_at_ns) / 1e9, s.dur_ns / 1e9) for s in found
    ]
    (instance,) = scheduler.explain(request(), clock.now()).instances
    instance_id = instance.instance_id
    assert said == [
        ("route", f"{instance_id} #0", 0.0, 10.0),
        ("queue_wait", "queue #0", 0.0, 10.0),
        ("queue_wait", "queue #1", 0.0, 15.0),
        ("route", f"{instance_id} #0", 10.0, 10.0),
    ]


async def test_the_deadline_ends_the_wait_with_what_was_missing():
    scheduler = fleet_of(0, queue_deadline_s=30.0)
    room, began = WaitingRoom(scheduler), clock.now()
    async with anyio.create_task_group() as tg:
        tg.start_soon(room.run)
        with pytest.raises(OverloadedError, match=r"within 30\.0 s \(no_instances\)"):
            async with room.place(request()):
                pass
        tg.cancel_scope.cancel()
    assert clock.now() - began == 30.0


async def test_a_stopping_run_ends_every_wait():
    scheduler = fleet_of(0)
    room = WaitingRoom(scheduler)

    async def wait():
        with pytest.raises(DrainingError):
            async with room.place(request()):
                pass

    async with anyio.create_task_group() as tg:
        tg.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        scheduler.stop_admitting()


async def test_a_cancelled_wait_leaves_nothing_behind():
    scheduler = fleet_of(0)
    room = WaitingRoom(scheduler)
    with anyio.move_on_after(5):
        async with room.place(request()):
            pass
    assert scheduler.num_waiting == 0
    scheduler.observe_instance(spec("late"), clock.now())
    assert scheduler.num_in_flight() == 0


async def test_a_place_found_in_the_moment_of_cancellation_is_given_back():
    scheduler = fleet_of(0)
    room = WaitingRoom(scheduler)

    async def wait():
        async with room.place(request()):
            await clock.sleep(1000)

    async with anyio.create_task_group() as tg:
        tg.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        scheduler.observe_instance(spec("late"), clock.now())
        tg.cancel_scope.cancel()
    assert scheduler.num_in_flight() == 0


async def test_a_block_that_ends_by_an_error_gives_its_place_back():
    scheduler = fleet_of(1)
    room = WaitingRoom(scheduler)

    async def breaks():
        async with room.place(request()):
            assert scheduler.num_in_flight(InstanceId("i0")) == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await breaks()
    assert scheduler.num_in_flight() == 0


async def test_a_pause_that_ends_by_time_alone_wakes_the_waiters():
    scheduler = fleet_of(1, now=clock.now())
    room, began = WaitingRoom(scheduler), clock.now()
    scheduler.fail(place(scheduler, began), "saturated", began, retry_after_s=3.0)
    async with anyio.create_task_group() as tg:
        tg.start_soon(room.run)
        async with room.place(request()) as placement:
            placement.complete(1)
        tg.cancel_scope.cancel()
    assert clock.now() - began == 3.0


async def test_what_an_engine_refuses_as_full_is_placed_again_within_one_deadline():
    scheduler = fleet_of(2, now=clock.now(), queue_deadline_s=20.0)
    room, began, seen = WaitingRoom(scheduler), clock.now(), []

    async def refused(placement):
        seen.append(placement.reservation.instance_id)
        raise SaturatedError("busy", retry_after_s=5.0)

    async with anyio.create_task_group() as tg:
        tg.start_soon(room.run)
        with pytest.raises(OverloadedError, match="found no instance"):
            await room.serve(request(), refused)
        tg.cancel_scope.cancel()
    assert clock.now() - began == 20.0
    assert seen == ["i0", "i1"] * 4
    assert scheduler.num_in_flight() == 0


async def test_the_first_engine_with_room_serves_and_its_result_is_returned():
    scheduler = fleet_of(2, now=clock.now())
    room, answers = WaitingRoom(scheduler), iter([RefusedError("weights unknown"), None])

    async def sometimes(placement):
        error = next(answers)
        if error is not None:
            raise error
        placement.complete(7)
        return placement.reservation.instance_id

    assert await room.serve(request(), sometimes) == "i1"
    assert scheduler.expected_output_tokens() == {"default": 7.0}


@pytest.mark.parametrize(
    ("error", "num_faults"),
    [(PeerError("reset"), 3), (RejectedError("too long"), 0), (LibraError("a bug"), 0)],
)
async def test_the_kind_of_an_error_says_whom_to_blame(error, num_faults):
    scheduler = fleet_of(1, now=clock.now())
    room = WaitingRoom(scheduler)

    async def fail(_placement):
        raise error

    for _ in range(3):
        with pytest.raises(type(error)):
            await room.serve(request(), fail)
    assert len(scheduler.take_notices()) == (num_faults == 3)
    assert scheduler.num_in_flight() == 0


async def test_what_is_taken_back_from_an_instance_is_placed_anew_and_none_is_lost():
    scheduler = fleet_of(2, now=clock.now(), queue_deadline_s=20.0)
    room, asked, answers = WaitingRoom(scheduler), [], []

    async def ask(placement):
        instance_id = placement.reservation.instance_id
        asked.append(instance_id)
        await clock.sleep(30.0)
        placement.complete(7)
        return instance_id

    async def one():
        answers.append(await room.serve(request(), ask))

    async with anyio.create_task_group() as tg:
        for _ in range(4):
            tg.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(asked) == ["i0", "i0", "i1", "i1"]
        await clock.sleep(25.0)  # past the deadline of the first wait for a place
        scheduler.drain_instance(InstanceId("i0"), True, clock.now())
        assert room.give_back(InstanceId("i0")) == 2
        await trio.testing.wait_all_tasks_blocked()
        assert scheduler.num_in_flight(InstanceId("i0")) == 0
    assert answers == ["i1"] * 4
    assert scheduler.num_in_flight() == 0
    assert room.give_back(InstanceId("i1")) == 0


async def test_a_request_of_which_part_of_the_answer_is_out_stays_where_it_is():
    scheduler = fleet_of(2, now=clock.now())
    room, answers = WaitingRoom(scheduler), []

    async def ask(placement):
        placement.pin()
        await clock.sleep(30.0)
        placement.complete(7)
        return placement.reservation.instance_id

    async def one():
        answers.append(await room.serve(request(), ask))

    async with anyio.create_task_group() as tg:
        tg.start_soon(one)
        await trio.testing.wait_all_tasks_blocked()
        scheduler.drain_instance(InstanceId("i0"), True, clock.now())
        assert room.give_back(InstanceId("i0")) == 0
    assert answers == ["i0"]


async def test_it_is_known_where_every_request_is():
    scheduler = fleet_of(1, now=clock.now(), max_in_flight_per_instance=1)
    room, requests = WaitingRoom(scheduler), [request(), request()]

    async def ask(placement):
        await clock.sleep(10.0)
        placement.complete(7)

    async with anyio.create_task_group() as tg:
        tg.start_soon(room.run)
        async with anyio.create_task_group() as users:
            for one in requests:
                users.start_soon(room.serve, one, ask)
                await trio.testing.wait_all_tasks_blocked()
            first, second = (it.request_id for it in requests)
            assert room.places() == {first: "i0", second: None}
            await clock.sleep(11.0)
            assert room.places() == {second: "i0"}
        tg.cancel_scope.cancel()
    assert room.places() == {}

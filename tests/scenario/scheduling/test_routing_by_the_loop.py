"""What a reload and a crash, as the loop tells of them, do to the prompts of an instance."""

import pytest
import trio.testing

from fleets import place, scheduling
from libra import clock
from libra.ids import Incarnation, InstanceId
from libra.scheduling.scheduler import Scheduler
from libra_supervisor.app.routing import SchedulerRouting
from libra_supervisor.gateway.waiting import WaitingRoom

pytestmark = pytest.mark.anyio
INSTANCES = tuple(InstanceId(f"vllm-{k}") for k in range(3))
PROMPTS = [f"p{k}" for k in range(12)]


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class OneDegree:
    """A fleet of instances of one GPU each."""

    def tp_of(self, _instance_id):
        return 1


def started(version):
    scheduler = Scheduler(scheduling(prefix_affinity=True))
    routing = SchedulerRouting(scheduler, OneDegree(), WaitingRoom(scheduler))
    come_up(routing, "first", version, is_planned=False)
    return scheduler, routing


def come_up(routing, incarnation, version, *, is_planned):
    for instance_id in INSTANCES:
        name = Incarnation(f"{instance_id}-{incarnation}")
        routing.know(instance_id, name, 1000, is_planned=is_planned)
        routing.serve(instance_id, version)


def homes(scheduler):
    found = {}
    for prompt in PROMPTS:
        reservation = place(scheduler, clock.now(), prompt=prompt)
        found[prompt] = reservation.instance_id
        scheduler.complete(reservation, 5, clock.now())
    return found


@pytest.mark.parametrize("method", ["inplace", "restart"])
async def test_a_reload_batch_of_either_method_leaves_every_prompt_where_it_was(method):
    scheduler, routing = started(version=1)
    before = homes(scheduler)
    assert set(before.values()) == set(INSTANCES)
    for instance_id in INSTANCES:
        routing.withdraw(instance_id, is_draining=True)
    if method == "restart":
        for instance_id in INSTANCES:
            routing.withdraw(instance_id, is_draining=False)
        come_up(routing, "second", 2, is_planned=True)
    else:
        for instance_id in INSTANCES:
            routing.serve(instance_id, 2)
    assert homes(scheduler) == before
    assert scheduler.affinity_counts.num_kept == len(PROMPTS)


@pytest.mark.case("R-B12", "R-B104")
async def test_a_crash_makes_the_prompts_of_that_instance_void_and_counts_them():
    scheduler, routing = started(version=1)
    before = homes(scheduler)
    lost = INSTANCES[0]
    routing.withdraw(lost, is_draining=False)
    routing.know(lost, Incarnation("again"), 1000, is_planned=False)
    routing.serve(lost, 1)
    homes(scheduler)
    num_lost = sum(home == lost for home in before.values())
    assert scheduler.affinity_counts.num_broken == num_lost > 0
    assert scheduler.affinity_counts.num_kept == len(PROMPTS) - num_lost

"""Requests that some instances did not answer before."""

import pytest

from fleets import SECOND, avoiding, fleet_of, place, request, spec
from libra.ids import InstanceId
from libra.scheduling.request import Routed

I0, I1 = InstanceId("i0"), InstanceId("i1")


def place_but(scheduler, *avoided, **what):
    routed = scheduler.route(avoiding(request(**what), *avoided), 0.0)
    assert isinstance(routed, Routed)
    return routed.reservation


def test_an_instance_that_did_not_answer_is_passed_by_however_little_it_has_to_do():
    scheduler = fleet_of(3)
    busy = [place_but(scheduler, "i0") for _ in range(10)]
    assert {it.instance_id for it in busy} == {"i1", "i2"}
    assert place(scheduler).instance_id == I0
    assert place_but(scheduler, "i0", "i2").instance_id == I1


def test_of_the_others_the_least_loaded_is_taken():
    scheduler = fleet_of(3)
    for _ in range(4):
        place_but(scheduler, "i0", "i2")
    assert place_but(scheduler, "i0").instance_id == "i2"


def test_it_is_taken_where_no_other_can_serve():
    scheduler = fleet_of(2)
    scheduler.set_ready(I1, False, 0.0)
    assert place_but(scheduler, "i0").instance_id == I0
    scheduler.set_ready(I1, True, 0.0)
    assert place_but(scheduler, "i0").instance_id == I1
    assert place_but(scheduler, "i0", "i1").instance_id == I0


@pytest.mark.parametrize("min_version", [None, 1])
def test_an_instance_of_too_old_a_version_is_no_other(min_version):
    scheduler = fleet_of(1)
    scheduler.observe_instance(spec("i1", incarnation=SECOND, version=1), 0.0)
    expected = I0 if min_version is None else I1
    assert place_but(scheduler, "i1", min_version=min_version).instance_id == expected


def test_where_its_prompt_is_has_no_precedence_and_stays_as_it_is():
    scheduler = fleet_of(3, prefix_affinity=True)
    home = place(scheduler, prompt="p").instance_id
    other = place_but(scheduler, home, prompt="p").instance_id
    assert other != home
    assert place(scheduler, prompt="p").instance_id == home


def test_what_is_explained_is_what_is_done():
    scheduler = fleet_of(2, prefix_affinity=True)
    home = place(scheduler, prompt="p").instance_id
    wanted = avoiding(request(prompt="p"), home)
    told = scheduler.explain(wanted, 0.0)
    routed = scheduler.route(wanted, 0.0)
    assert isinstance(routed, Routed)
    assert told.choice == routed.instance != home
    assert told.reason == f"{routed.instance} is the most preferred candidate but for {home}"

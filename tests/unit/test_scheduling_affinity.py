"""Prompts that keep to an instance, and when they leave it."""

from collections import Counter

import pytest

from fleets import SECOND, fleet_of, place, request, snapshot, spec
from libra.ids import InstanceId
from libra.scheduling.affinity import MARGIN_REQUESTS
from libra.scheduling.slow_start import DURATION_S

I0 = InstanceId("i0")


def sticky_fleet(num_instances, **options):
    scheduler = fleet_of(num_instances, prefix_affinity=True, **options)
    scheduler.on_tick(DURATION_S)
    return scheduler, DURATION_S


def test_siblings_share_an_instance_and_groups_spread():
    scheduler, now = sticky_fleet(4)
    homes = {}
    for prompt in range(8):
        homes[prompt] = {place(scheduler, now, prompt=f"p{prompt}").instance_id for _ in range(8)}
    assert all(len(home) == 1 for home in homes.values())
    assert set(Counter(min(home) for home in homes.values()).values()) == {2}


@pytest.mark.case("R-B04")
def test_an_instance_that_is_down_costs_the_others_no_affinity():
    scheduler, now = sticky_fleet(4)
    for prompt in range(12):
        scheduler.complete(place(scheduler, now, prompt=f"p{prompt}"), 5, now)
    scheduler.set_ready(I0, False, now)
    for _ in range(5):
        for prompt in range(12):
            scheduler.complete(place(scheduler, now, prompt=f"p{prompt}"), 5, now)
    counts = scheduler.affinity_counts
    assert (counts.num_new, counts.num_migrated) == (12, 3)
    assert counts.num_kept == 5 * 12 - 3


@pytest.mark.case("R-B44")
def test_a_session_leaves_an_instance_that_carries_too_much_and_does_not_swing():
    scheduler, now = sticky_fleet(2)
    first = place(scheduler, now, prompt="session")
    home = first.instance_id
    long = [place(scheduler, now, prompt="session") for _ in range(MARGIN_REQUESTS)]
    assert {r.instance_id for r in long} == {home}
    moved = place(scheduler, now, prompt="session")
    assert moved.instance_id != home
    seen = [place(scheduler, now, prompt="session").instance_id for _ in range(2 * MARGIN_REQUESTS)]
    assert set(seen) == {moved.instance_id}
    assert scheduler.affinity_counts.num_migrated == 1


def test_a_sticky_instance_at_its_cap_is_passed_by_and_the_prompt_remaps():
    scheduler, now = sticky_fleet(2, max_in_flight_per_instance=2)
    first = [place(scheduler, now, prompt="p") for _ in range(2)]
    moved = place(scheduler, now, prompt="p")
    assert moved.instance_id != first[0].instance_id
    for reservation in first:
        scheduler.complete(reservation, 5, now)
    assert place(scheduler, now, prompt="p").instance_id == moved.instance_id


@pytest.mark.case("T-B74")
def test_a_sticky_instance_with_preemptions_is_left():
    scheduler, now = sticky_fleet(2, enable_metrics_feedback=True)
    home = place(scheduler, now, prompt="p").instance_id
    for at, counter in ((now, 1), (now + 1, 2)):
        scheduler.on_snapshot(home, snapshot(at, num_preemptions=counter), at)
    assert place(scheduler, now + 1, prompt="p").instance_id != home


def test_a_sticky_instance_that_is_too_old_for_the_request_is_passed_by():
    scheduler, now = sticky_fleet(2)
    home = place(scheduler, now, prompt="p").instance_id
    other = InstanceId({"i0": "i1", "i1": "i0"}[home])
    scheduler.set_version(other, 1, now)
    assert place(scheduler, now, prompt="p", min_version=1).instance_id == other


@pytest.mark.case("R-B104")
def test_an_unplanned_restart_breaks_the_prompts_and_is_counted():
    scheduler, now = sticky_fleet(1)
    for prompt in range(5):
        scheduler.complete(place(scheduler, now, prompt=f"p{prompt}"), 5, now)
    scheduler.restart_instance(spec("i0", incarnation=SECOND), now, is_planned=False)
    for prompt in range(5):
        place(scheduler, now, prompt=f"p{prompt}")
    assert scheduler.affinity_counts.num_broken == 5


@pytest.mark.parametrize("is_planned_restart", [True, False])
def test_a_weight_sync_of_either_method_keeps_the_prompts(is_planned_restart):
    scheduler, now = sticky_fleet(4)
    homes = {}
    for prompt in range(8):
        reservation = place(scheduler, now, prompt=f"p{prompt}")
        homes[prompt] = reservation.instance_id
        scheduler.complete(reservation, 5, now)
    for k in range(4):
        name = InstanceId(f"i{k}")
        if is_planned_restart:
            new = spec(name, incarnation=SECOND, version=1)
            scheduler.restart_instance(new, now, is_planned=True)
        else:
            scheduler.set_version(name, 1, now)
    for prompt, home in homes.items():
        assert place(scheduler, now, prompt=f"p{prompt}").instance_id == home
    assert scheduler.affinity_counts.num_kept == 8


def test_a_removed_instance_takes_its_prompts_with_it():
    scheduler, now = sticky_fleet(2)
    home = place(scheduler, now, prompt="p").instance_id
    scheduler.remove_instance(home)
    assert place(scheduler, now, prompt="p").instance_id != home
    assert scheduler.affinity_counts.num_broken == 1


def test_the_table_forgets_the_least_recently_used():
    scheduler, now = sticky_fleet(2, prefix_affinity_max_entries=2)
    for prompt in ("a", "b", "a", "c"):
        place(scheduler, now, prompt=prompt)
    assert scheduler.affinity_counts.num_kept == 1
    place(scheduler, now, prompt="a")
    assert scheduler.affinity_counts.num_kept == 2
    place(scheduler, now, prompt="b")
    assert scheduler.affinity_counts.num_new == 4


def test_affinity_works_under_round_robin_too():
    scheduler, now = sticky_fleet(3, load_balance_strategy="round_robin")
    assert len({place(scheduler, now, prompt="p").instance_id for _ in range(6)}) == 1
    assert len({place(scheduler, now).instance_id for _ in range(3)}) == 3


def test_without_affinity_a_prompt_id_means_nothing():
    scheduler = fleet_of(2)
    assert {place(scheduler, prompt="p").instance_id for _ in range(2)} == {"i0", "i1"}
    assert scheduler.affinity_counts.num_new == 0


def test_an_explanation_names_filters_values_and_the_prefix():
    scheduler, now = sticky_fleet(3)
    home = place(scheduler, now, prompt="p").instance_id
    down = next(v.instance_id for v in scheduler.instances(now) if v.instance_id != home)
    scheduler.set_ready(down, False, now)
    told = scheduler.explain(request(prompt="p"), now)
    assert told.choice == home
    assert told.reason == f"{home} has the prompt's prefix and is within the margin"
    assert told.instances[-1].instance_id == down
    assert told.instances[-1].removed_by == "not_ready"
    assert [view.load for view in told.instances] == [0.0, 1.0, 0.0]
    for _ in range(MARGIN_REQUESTS):
        place(scheduler, now, prompt="p")
    assert "is no candidate within the margin" in scheduler.explain(request(prompt="p"), now).reason
    assert "is the most preferred candidate" in scheduler.explain(request(), now).reason


def test_an_explanation_of_a_wait_names_what_is_missing():
    scheduler = fleet_of(0)
    assert scheduler.explain(request(), 0.0).reason == "waits: no_instances"
    scheduler.observe_instance(spec("i0", version=None), 0.0)
    told = scheduler.explain(request(), 0.0)
    assert (told.choice, told.reason) == (None, "waits: stale_version")
    assert told.instances[0].policy_version is None


@pytest.mark.case("R-B44")
def test_the_margin_is_in_requests_whatever_the_load_is_measured_in():
    capacities = {"kv_capacity_tokens_by_tp": {1: 100_000}}
    for options in (
        {"load_metric": "tokens"},
        {"load_metric": "kv_tokens", **capacities},
        {"load_balance_strategy": "weighted", "load_balance_weights": {"tp1": 7.0}},
    ):
        scheduler, now = sticky_fleet(2, **options)
        homes = [place(scheduler, now, prompt="p").instance_id for _ in range(2 + MARGIN_REQUESTS)]
        assert Counter(homes).most_common() == [(homes[0], 1 + MARGIN_REQUESTS), (homes[-1], 1)]

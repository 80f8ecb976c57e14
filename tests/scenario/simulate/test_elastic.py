"""Loads that drift, on the real planner, scheduler and Replanner."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from libra.config.load import load_config
from libra.errors import DataError
from libra.planner.plan import HybridPlacement
from libra.simulate.drift import DriftingLengths, Phase, read_drift
from libra.simulate.elastic import compare_drift
from libra.simulate.reconfiguration import SwitchTimes
from libra.simulate.render import render_drift
from libra.simulate.run import simulate
from libra.simulate.scenarios import planned, split_of

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "configs" / "qwen2_5_7b_8gpu.yaml"
READS = {"prompt_tokens": 12000, "response_mean_tokens": 400.0, "response_sigma": 0.6}
WRITES = {"prompt_tokens": 256, "response_mean_tokens": 4000.0, "response_sigma": 1.0}


def config(*overrides):
    half = ("batch_size=120", "max_concurrent_rollouts=240")
    return load_config(CONFIG, overrides=(*half, *overrides), purpose="plan").config


def drifting(*phases, seed=1, last=30, **first):
    """One phase after the other, each `last` steps."""
    return DriftingLengths(
        seed=seed,
        longest=16384,
        phases=tuple(
            Phase(from_step=last * index, **phase, **(first if index else {}))
            for index, phase in enumerate(phases)
        ),
    )


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)])
def followed(request):
    """There and back again."""
    lengths = drifting(READS, WRITES, READS, seed=request.param, last=40)
    return compare_drift(config(), lengths, num_steps=120, seed=request.param)


def test_elastic_has_little_regret_against_the_best_plan_in_hindsight(followed):
    assert followed.regret_fraction < 0.10
    assert followed.regret_of_each_fraction < 0.10


def test_elastic_is_faster_than_what_was_planned_at_the_start(followed):
    assert followed.elastic.total_s < 0.98 * followed.start.total_s
    assert followed.elastic.total_s < followed.static.total_s


def test_no_more_switches_than_real_changes(followed):
    assert followed.num_changes == 2
    assert 1 <= followed.num_switches <= followed.num_changes


def test_what_was_decided_is_shown_with_its_reasons(followed):
    text = render_drift(followed)
    assert "planned at start" in text
    assert "regret of elastic" in text
    assert "worth it" in text
    assert "the load changed 2 times" in text


@pytest.mark.parametrize(("load", "seed"), [(READS, 4), (WRITES, 5)])
def test_a_load_that_does_not_drift_is_left_alone(load, seed):
    found = compare_drift(config(), drifting(load, seed=seed), num_steps=45, seed=seed)
    assert found.num_switches == 0
    assert found.elastic.total_s == pytest.approx(found.start.total_s)
    assert len(found.decided) >= 4


@pytest.mark.long
def test_a_load_that_goes_over_slowly_is_followed_too():
    lengths = drifting(WRITES, READS, last=30, ramp_steps=20)
    found = compare_drift(config(), lengths, num_steps=110, seed=1)
    assert 1 <= found.num_switches <= 2
    assert found.regret_fraction < 0.10


def test_equal_seeds_give_equal_comparisons():
    lengths = drifting(READS, WRITES, last=8)
    once, again = (compare_drift(config(), lengths, num_steps=16, seed=1) for _ in range(2))
    assert once == again


def test_what_the_configuration_does_not_allow_is_not_done():
    only_rollout = config(
        "global_resource_planner.runtime_dynamic_reconfiguration_enabled=true",
        "global_resource_planner.runtime_online_replanning=true",
    )
    found = compare_drift(only_rollout, drifting(READS, WRITES, last=15), num_steps=35, seed=1)
    assert found.decided
    assert {decided.switch_kind for decided in found.decided} <= {"", "rollout"}


class Once:
    """A steward that goes over to one plan after a step."""

    def __init__(self, plan, *, after):
        self.times = SwitchTimes()
        self.stalls = []
        self._plan, self._after = plan, after

    def on_step(self, seen, plan, now):
        return self._plan if seen.step == self._after else None

    def on_changed(self, stalled_s, now):
        self.stalls.append((stalled_s, now))


def switched(new, *, start=None, load=READS, overrides=()):
    run = config(*overrides)
    lengths = drifting(load)
    scenario = start or planned(run, lengths.demand(run))
    scenario = replace(scenario, more_degrees=frozenset({1, 2, 4}))
    steward = Once(new, after=4)
    result = simulate(scenario, lengths, num_steps=12, seed=1, steward=steward)
    return result, steward


def fours():
    run = config()
    return split_of(run, drifting(WRITES).demand(run), train_gpus=4).plan


def sixes():
    run = config()
    return split_of(run, drifting(READS).demand(run), train_gpus=6).plan


def test_another_core_holds_training_and_every_step_still_trains_a_whole_batch():
    result, steward = switched(fours())
    assert [stalled for stalled, _ in steward.stalls] == [120.0]
    assert {step.num_trajectories for step in result.steps} == {120}
    assert result.rollout == "1 x TP4"


def test_servers_that_go_end_what_they_run_or_give_it_back():
    def ended_at(*overrides):
        result, steward = switched(sixes(), load=WRITES, overrides=overrides)
        assert {step.num_trajectories for step in result.steps} == {120}
        return steward.stalls[0][1]

    stops = "global_resource_planner.runtime_drain_before_reconfigure=false"
    assert ended_at(stops) < ended_at()


def test_a_replica_that_joins_makes_steps_shorter_and_one_that_leaves_longer():
    run = config("global_resource_planner.allowed_rollout_tp=[2]")
    start = split_of(run, drifting(READS).demand(run), train_gpus=4)
    joined = replace(
        start.plan,
        instances=start.plan.instances[:1],
        hybrids=(HybridPlacement(replica_id="hybrid-0", slots=start.plan.instances[1].slots),),
    )
    result, steward = switched(joined, start=start)
    trained = [step.ended_at - step.started_at for step in result.steps]
    assert steward.stalls[0][0] == 0.0
    assert trained[-1] < 0.75 * trained[2]
    back, _ = switched(start.plan, start=replace(start, plan=joined))
    trained = [step.ended_at - step.started_at for step in back.steps]
    assert trained[-1] > 1.3 * trained[2]


def test_a_ramp_lies_between_its_ends():
    lengths = drifting(READS, WRITES, last=10, ramp_steps=10)
    means = [lengths.at(step).response_mean_tokens for step in range(25)]
    assert [means[0], means[10]] == pytest.approx([400, 400])
    assert means[10] < means[15] < means[20] == 4000.0


def phase_line(**changes):
    phase = {"from_step": 0, "prompt_tokens": 9, "response_mean_tokens": 1, "response_sigma": 1}
    return json.dumps(phase | changes)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "holds no phases"),
        (['{"from_step": 0}'], ":1: "),
        ([phase_line(from_step=3)], "the first phase begins at step 0"),
        ([phase_line(prompt_tokens=99999)], "prompt_tokens must be from 1 to"),
        ([phase_line(response_mean_tokens=0)], "response_mean_tokens must be at least 1"),
        ([phase_line(response_sigma=-1)], "response_sigma must be at least 0"),
        ([phase_line(ramp_steps=-1)], "ramp_steps must be at least 0"),
        ([phase_line()] * 2, ":2: from_step must be above the one before"),
    ],
)
def test_a_drift_file_that_says_nothing_usable_is_refused(tmp_path, lines, said):
    path = tmp_path / "drift.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=str(path)) as refused:
        read_drift(path, config(), seed=1)
    assert said in str(refused.value)


def test_a_drift_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_drift(tmp_path / "nothing.jsonl", config(), seed=1)

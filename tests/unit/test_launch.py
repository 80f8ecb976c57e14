from pathlib import Path

import msgspec
import pytest

from libra.config.algorithm import AlgorithmConfig
from libra.config.data import DataConfig
from libra.config.environment import Environment
from libra.config.load import LoadedConfig, dump_resolved
from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.rollout import HeterogeneousRolloutConfig, RolloutConfig, TpBucket
from libra.config.run import RunConfig
from libra.config.run_control import RunControlConfig
from libra.config.training import TrainingConfig
from libra.errors import ConfigError, InfeasiblePlanError, SiteError
from libra.ids import InstanceId, NodeRank, ReplicaId, SlotId
from libra.planner.applied import planned_config
from libra.planner.placement import spread_over_nodes
from libra.planner.plan import (
    HybridPlacement,
    InstancePlacement,
    Plan,
    TrainPlacement,
    configured_plan,
    plan_in_words,
)
from libra.rollouts.accounts import LEASE_S
from libra_supervisor.app import launch
from libra_supervisor.app.launch import (
    Launch,
    RunRequest,
    choose_directory,
    earlier_run,
    gpus_per_node,
    new_run_id,
    num_gpus_of,
    num_slots_of,
)
from libra_supervisor.app.parts import buffer_limits
from libra_supervisor.app.recall import PLAN_FACT
from libra_supervisor.doctor.devices import cuda_devices, resolved_device, slot_devices
from libra_supervisor.journal import StateFile, SupervisorState
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.nodes.site import Site
from libra_supervisor.run_directory import RunDirectory
from planner_cases import A100_80G

TWO_NODES = Site(hosts=("a", "b"), port=1, rank=NodeRank(0))


def config(**sections) -> RunConfig:
    return RunConfig(model=ModelConfig(model_path="/m"), **sections)


def request(run_directory=None, *, is_resume=False, run_name="") -> RunRequest:
    loaded = LoadedConfig(
        config=config(control=RunControlConfig(run_name=run_name)),
        place_of={},
        warnings=(),
        sources=(),
        environment=Environment(),
    )
    return RunRequest(
        loaded=loaded,
        config_path=Path("configs/mine.yaml"),
        environ={},
        run_directory=run_directory,
        is_resume=is_resume,
    )


def made(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "config.resolved.json").write_text("{}")
    return root


@pytest.fixture
def working(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_run_gets_a_directory_named_after_its_configuration_and_the_time(working):
    directory = choose_directory(request())
    assert directory.root.parent == working / "runs"
    assert directory.root.name.startswith("mine-20")
    assert choose_directory(request(run_name="other")).root.name.startswith("other-20")


def test_resume_without_a_directory_takes_the_newest_run_of_that_configuration(working):
    made(working / "runs/mine-20260101T000000")
    newest = made(working / "runs/mine-20260301T000000")
    made(working / "runs/theirs-20260401T000000")
    (working / "runs/mine-20260501T000000").mkdir()  # stopped before it wrote anything
    assert choose_directory(request(is_resume=True)).root == newest


def test_resume_prefers_the_newest_run_that_saved_something(working, monkeypatch):
    saved = made(working / "runs/mine-20260101T000000")
    made(working / "runs/mine-20260301T000000")  # a start that failed
    made(working / "runs/mine-too-20260401T000000")  # of another configuration
    monkeypatch.setattr(
        launch, "list_complete_checkpoints", lambda path: [1] if path.parent == saved else []
    )
    assert choose_directory(request(is_resume=True)).root == saved


def launch_of(working, plan, **changes) -> Launch:
    """On CPU, without a report, a calibration or devices."""
    usual = {"report": None, "book": None, "store": None, "device": "cpu", "devices": ()}
    directory = RunDirectory(working)
    return Launch(directory=directory, plan=plan, environ={}, **usual, **changes)


def test_a_resumed_run_plans_for_all_its_devices_lent_and_idle_ones_too(working):
    core = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(0),))
    server = InstancePlacement(instance_id=InstanceId("vllm-0"), tp=1, slots=(SlotId(1),))
    lent = HybridPlacement(replica_id=ReplicaId("hybrid-1"), slots=(SlotId(2),))
    alone = Plan(strategy="grp", train=core, instances=(server,))
    asked = request()
    sizes = {"training": TrainingConfig(train_gpus=1), "rollout": RolloutConfig(rollout_gpus=3)}
    loaded = msgspec.structs.replace(asked.loaded, config=config(**sizes))
    launch = launch_of(
        working,
        alone,
        config=config(),
        given=planned_config(config(**sizes), alone),
        loaded=loaded,
        is_resume=True,
        memory=PlanMemory(plan=msgspec.structs.replace(alone, hybrids=(lent,)), next_number=2),
    )
    assert num_gpus_of(launch) == 4
    fewer = {"training": TrainingConfig(train_gpus=1), "rollout": RolloutConfig(rollout_gpus=1)}
    loaded = msgspec.structs.replace(asked.loaded, config=config(**fewer))
    assert num_gpus_of(msgspec.structs.replace(launch, loaded=loaded)) == 3


def test_slots_that_were_lent_are_there_after_a_resume_on_cpu(working):
    core = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(0),))
    server = InstancePlacement(instance_id=InstanceId("vllm-0"), tp=1, slots=(SlotId(1),))
    lent = HybridPlacement(replica_id=ReplicaId("hybrid-1"), slots=(SlotId(2000),))
    alone = Plan(strategy="grp", train=core, instances=(server,))
    changes = PlannerConfig(runtime_dynamic_reconfiguration_enabled=True)
    launch = launch_of(
        working,
        alone,
        config=config(global_resource_planner=changes),
        given=config(),
        loaded=request().loaded,
        is_resume=True,
        memory=PlanMemory(plan=msgspec.structs.replace(alone, hybrids=(lent,)), next_number=2),
    )
    assert num_slots_of(launch) == 2001
    assert num_slots_of(msgspec.structs.replace(launch, memory=None)) < 2001
    assert num_slots_of(msgspec.structs.replace(launch, config=config())) == 2


def test_a_run_that_went_on_without_a_node_is_resumed_with_the_layout_of_all(working):
    core = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=2, slots=(SlotId(0), SlotId(1)))
    server = InstancePlacement(instance_id=InstanceId("vllm-0"), tp=1, slots=(SlotId(2),))
    home = Plan(strategy="grp", train=core, instances=(server,))
    small = msgspec.structs.replace(core, dp=1, slots=core.slots[:1])
    left = msgspec.structs.replace(home, train=small)
    directory = RunDirectory(working)
    asked = config(training=TrainingConfig(train_gpus=2), rollout=RolloutConfig(rollout_gpus=1))
    directory.resolved_config_json.write_bytes(dump_resolved(planned_config(asked, left)))

    def keep(memory):
        facts = {PLAN_FACT: msgspec.to_builtins(memory)}
        state = SupervisorState(run_id="r", written_at_ns=1, supervisor_pid=1, facts=facts)
        StateFile(directory.state).save(state)

    keep(PlanMemory(plan=left, next_number=1, home=home))
    assert earlier_run(directory)[0].training.train_gpus == 2
    keep(PlanMemory(plan=left, next_number=1))
    assert earlier_run(directory)[0].training.train_gpus == 1


def test_a_changed_plan_is_resumed_where_it_was_and_not_spread_over_the_nodes_again():
    asked = config(training=TrainingConfig(train_gpus=1), rollout=RolloutConfig(rollout_gpus=1))
    found = configured_plan(asked)
    spread = launch._first_plan(found, None, asked, TWO_NODES)
    assert (spread.instances[0].node, spread.train.node) == (0, 1)
    changed = msgspec.structs.replace(
        spread, train=msgspec.structs.replace(spread.train, slots=(SlotId(3),), node=NodeRank(0))
    )
    memory = PlanMemory(plan=changed, next_number=1)
    assert launch._first_plan(found, memory, asked, TWO_NODES) == changed


@pytest.mark.parametrize(
    ("gpus", "described", "per_node"), [((4, 4), None, 4), ((4, 5), None, 5), ((2, 2), 8, 8)]
)
def test_every_node_counts_as_described_or_as_having_its_share(working, gpus, described, per_node):
    hardware = msgspec.structs.replace(A100_80G, gpus_per_node=described or 1)
    asked = config(
        training=TrainingConfig(train_gpus=gpus[0]),
        rollout=RolloutConfig(rollout_gpus=gpus[1]),
        hardware=hardware if described else None,
    )
    made = launch_of(
        working,
        configured_plan(asked),
        config=asked,
        given=asked,
        loaded=msgspec.structs.replace(request().loaded, config=asked),
        is_resume=False,
        site=TWO_NODES,
    )
    assert gpus_per_node(made) == per_node
    assert gpus_per_node(msgspec.structs.replace(made, site=None)) is None


def test_a_resumed_run_over_nodes_counts_no_more_slots_here_than_before(working):
    changes = PlannerConfig(runtime_dynamic_reconfiguration_enabled=True)
    asked = config(
        training=TrainingConfig(train_gpus=4),
        rollout=RolloutConfig(rollout_gpus=4),
        global_resource_planner=changes,
    )
    plan = spread_over_nodes(configured_plan(asked), gpus_per_node=4)
    made = launch_of(
        working,
        plan,
        config=asked,
        given=asked,
        loaded=msgspec.structs.replace(request().loaded, config=asked),
        is_resume=True,
        site=TWO_NODES,
    )
    assert num_slots_of(made) == 4
    memory = PlanMemory(plan=plan, next_number=4)
    assert num_slots_of(msgspec.structs.replace(made, memory=memory)) == 4


def test_resume_with_nothing_to_resume_says_where_it_looked(working):
    with pytest.raises(ConfigError, match=r"no run of mine in .*/runs"):
        choose_directory(request(is_resume=True))


def test_a_directory_with_a_run_in_it_is_not_overwritten(working):
    used = made(working / "used")
    with pytest.raises(ConfigError, match="--resume"):
        choose_directory(request(used))
    assert choose_directory(request(used, is_resume=True)).root == used


def test_resume_into_an_empty_directory_is_a_new_run_as_systemd_starts_it(working):
    assert choose_directory(request(working / "fresh", is_resume=True)).root == working / "fresh"


def test_run_ids_of_one_directory_differ():
    directory = RunDirectory(Path("/runs/mine-1"))
    assert new_run_id(directory) != new_run_id(directory)


def test_the_configured_plan_puts_rollout_first_and_training_after_it():
    plan = configured_plan(
        config(
            training=TrainingConfig(train_gpus=4, train_tp_size=2),
            rollout=RolloutConfig(rollout_gpus=4),
            heterogeneous_rollout=HeterogeneousRolloutConfig(
                instances=[TpBucket(tp=1, count=2), TpBucket(tp=2, count=1)]
            ),
        )
    )
    assert [i.slots for i in plan.instances] == [(0,), (1,), (2, 3)]
    assert plan.train.slots == (4, 5, 6, 7)
    assert plan_in_words(plan) == (
        "train 4 GPUs (TP 2, PP 1, CP 1, DP 2), rollout 4 GPUs (2 x TP 1, 1 x TP 2)"
    )


def test_buckets_that_do_not_add_up_have_no_plan():
    wrong = config(
        rollout=RolloutConfig(rollout_gpus=3),
        heterogeneous_rollout=HeterogeneousRolloutConfig(instances=[TpBucket(tp=2, count=1)]),
    )
    with pytest.raises(InfeasiblePlanError, match="use 2 GPUs, rollout_gpus is 3"):
        configured_plan(wrong)


def test_cuda_devices_are_those_that_are_visible():
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}) == ("GPU-a", "GPU-b")
    assert cuda_devices({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_auto_takes_what_is_there_and_cuda_without_a_device_is_refused():
    assert resolved_device("auto", {"CUDA_VISIBLE_DEVICES": "0"}) == "cuda"
    assert resolved_device("auto", {"CUDA_VISIBLE_DEVICES": ""}) == "cpu"
    with pytest.raises(SiteError, match="no NVIDIA device is visible"):
        resolved_device("cuda", {"CUDA_VISIBLE_DEVICES": ""})


def test_slots_share_cores_on_cpu_and_never_share_a_gpu():
    shared = slot_devices("cpu", num_slots=1000, environ={})
    assert len(shared) == 1000
    two = {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert slot_devices("cuda", num_slots=2, environ=two) == ("0", "1")
    with pytest.raises(SiteError, match="uses 3 GPUs and 2 are visible"):
        slot_devices("cuda", num_slots=3, environ=two)


def test_what_bounds_the_rollouts_comes_from_the_configuration():
    limits = buffer_limits(
        config(
            algorithm=AlgorithmConfig(n_samples=4, max_flat_drops=3),
            training=TrainingConfig(batch_size=32),
            data=DataConfig(reward_timeout_s=5000.0),
        )
    )
    assert (limits.n_samples, limits.batch_size, limits.max_flat_drops) == (4, 32, 3)
    # A wait for a place and a reward bound themselves: only what is silent beyond them is lost.
    assert limits.lease_s == LEASE_S + 5000.0
    assert buffer_limits(config()).lease_s == LEASE_S + 600.0
    assert buffer_limits(config()).max_flat_drops == 0

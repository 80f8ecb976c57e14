import msgspec
import pytest

from libra.errors import ConfigError
from libra.ids import ReplicaId
from libra.planner.applied import pinned_config, planned_config
from libra.planner.plan import HybridPlacement, configured_plan
from libra.planner.search import plan
from planner_cases import grp_config


def sizes(config):
    return configured_plan(config).train, list(config.heterogeneous_rollout.instances)


def test_a_resumed_run_keeps_its_layout_whatever_was_learned_since():
    given = grp_config()
    ran = planned_config(given, plan(given).plan)
    again = pinned_config(given, ran)
    assert sizes(again) == sizes(ran)
    assert again.training.micro_batch_size == ran.training.micro_batch_size
    assert again.global_resource_planner.initial_allocation_strategy == "configured"


def test_a_configured_split_is_left_to_the_checks_of_resume():
    given = grp_config(planner={"initial_allocation_strategy": "configured"})
    assert pinned_config(given, grp_config(num_gpus=16)) is given


def test_what_is_lent_to_replicas_is_rollout_s_all_the_same():
    given = grp_config()
    found = plan(given).plan
    slots = tuple(slot for it in found.instances for slot in it.slots)
    lent = (HybridPlacement(replica_id=ReplicaId("hybrid-0"), slots=slots),)
    config = planned_config(given, msgspec.structs.replace(found, instances=(), hybrids=lent))
    assert config.rollout.rollout_gpus == len(slots) == found.num_rollout_gpus
    assert config.training.train_gpus == found.train.world_size
    pinned_config(given, config)


def test_the_planner_s_budget_cannot_change_on_resume():
    given = grp_config()
    ran = planned_config(given, plan(given).plan)
    more = msgspec.structs.replace(
        given, rollout=msgspec.structs.replace(given.rollout, rollout_gpus=32)
    )
    with pytest.raises(ConfigError, match="is 56 and was 48"):
        pinned_config(more, ran)


def test_a_budget_of_which_replicas_have_a_part_is_the_one_it_was():
    given = grp_config()
    found = plan(given).plan
    *stay, left = found.instances
    lent = (HybridPlacement(replica_id=ReplicaId("hybrid-0"), slots=left.slots),)
    changed = msgspec.structs.replace(found, instances=tuple(stay), hybrids=lent)
    ran = planned_config(given, changed)
    assert ran.rollout.rollout_gpus < found.num_rollout_gpus
    assert sizes(pinned_config(given, ran, changed=changed)) == sizes(ran)
    with pytest.raises(ConfigError, match="is 40 and was 48"):
        pinned_config(
            msgspec.structs.replace(
                given,
                rollout=msgspec.structs.replace(
                    given.rollout, rollout_gpus=given.rollout.rollout_gpus - 8
                ),
            ),
            ran,
            changed=changed,
        )

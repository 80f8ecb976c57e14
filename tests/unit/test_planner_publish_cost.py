import msgspec
import pytest

from libra.planner.calibration import Calibration
from libra.planner.cost_models import cost_models
from planner_cases import grp_config

NOTHING_MEASURED = Calibration(hardware="", model="")


def publish(**weights):
    config = grp_config()
    changed = msgspec.structs.replace(config.weights, **weights)
    return cost_models(msgspec.structs.replace(config, weights=changed), NOTHING_MEASURED).publish


def test_a_transfer_sends_the_whole_model_to_everybody_and_files_are_read_in_shares():
    files, transfer = publish(), publish(rollout_weight_sync_mode="nccl")
    num_bytes = files.memory.budget(1).bytes_of["weights"]
    assert files.export_s == pytest.approx(num_bytes / 2e9)
    assert transfer.export_s == pytest.approx(num_bytes / 7e9)
    assert files.load_s(4) < files.load_s(1)
    assert transfer.load_s(4) == transfer.load_s(1) == pytest.approx(0.2 + num_bytes / 7e9)
    assert transfer.sync_s((1, 2, 4)) == transfer.load_s(1)


def test_a_restart_costs_a_start_and_no_sync_costs_nothing():
    inplace, restart = publish(), publish(rollout_weight_reload_method="restart")
    assert restart.load_s(2) == inplace.load_s(2) + 60.0
    never = publish(rollout_weight_sync_mode="none")
    assert (never.step_export_s(), never.step_sync_s((1,)), never.step_pause_s(1)) == (0, 0, 0)


def test_publishing_is_shared_by_the_steps_between_and_serial_is_one_after_another():
    every, third = publish(), publish(sync_interval=3)
    assert third.step_export_s() == pytest.approx(every.step_export_s() / 3)
    serial = publish(rollout_weight_reload_strategy="serial")
    assert serial.sync_s((2,)) == pytest.approx(4 * serial.load_s(2))

import pytest

from libra.config.environment import Environment, read_environment
from libra.config.problems import ConfigProblemsError


def test_an_empty_environment_says_nothing():
    assert read_environment({}) == Environment()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("0", False), ("OFF", False), ("", None)]
)
def test_the_trace_variable_is_a_boolean(text: str, value: object):
    assert read_environment({"RL_TRAIN_PHASE_TRACE": text}).phase_trace is value


def test_slurm_says_where_this_process_is():
    slurm = read_environment(
        {
            "SLURM_JOB_ID": "17",
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NODEID": "1",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_CPUS_ON_NODE": "64",
            "SLURM_JOB_GPUS": "0,1",
            "SLURM_RESTART_COUNT": "3",
            "SLURM_JOB_END_TIME": "1700000000",
        }
    ).slurm
    assert slurm is not None
    assert (slurm.job_id, slurm.num_job_nodes, slurm.num_step_nodes) == (17, 4, 2)
    assert (slurm.node_rank, slurm.task_rank, slurm.num_tasks) == (1, 1, 2)
    assert (slurm.gpus, slurm.restart_count) == (("0", "1"), 3)
    assert slurm.end_time_s == 1_700_000_000


def test_torchrun_says_which_rank_this_is():
    torchrun = read_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
    ).torchrun
    assert torchrun is not None
    assert (torchrun.rank, torchrun.world_size, torchrun.local_rank) == (3, 4, 1)
    assert (torchrun.master_addr, torchrun.master_port) == ("h", 9)


def test_no_visible_devices_differs_from_nothing_said():
    assert read_environment({"CUDA_VISIBLE_DEVICES": ""}).cuda_visible_devices == ()
    assert read_environment({"CUDA_VISIBLE_DEVICES": "GPU-a, 1"}).cuda_visible_devices == (
        "GPU-a",
        "1",
    )
    assert read_environment({}).cuda_visible_devices is None


def test_every_senseless_variable_is_named():
    with pytest.raises(ConfigProblemsError) as caught:
        read_environment(
            {"RL_TRAIN_PHASE_TRACE": "maybe", "SLURM_JOB_ID": "x", "SLURM_NODEID": "-1"}
        )
    assert [problem.path for problem in caught.value.problems] == [
        "RL_TRAIN_PHASE_TRACE",
        "SLURM_JOB_ID",
        "SLURM_NODEID",
    ]

import msgspec
import pytest

from libra.planner.calibration import Calibration, Factor
from libra.planner.cost_models import cost_models
from libra.planner.demand import Demand
from libra.planner.pipeline import StageTimes, bubble_fraction, one_forward_one_backward_s
from libra.planner.train_cost import TrainWork
from libra.planner.train_layout import TrainLayout
from planner_cases import H200_141G, MEASURED_1_8B, QWEN3_14B, QWEN3_30B_A3B, grp_config

NOTHING_MEASURED = Calibration(hardware="", model="")
ONE_RANK = TrainLayout(tp=1, ep=1, pp=1, cp=1, dp=1, micro_batch_size=1)


def work_of(num_sequences, length, *, mini_batch_size=None):
    demand = Demand(
        prompt_tokens=(0,) * num_sequences,
        response_tokens=(length,) * num_sequences,
        source="test",
    )
    return TrainWork(demand, mini_batch_size=mini_batch_size or num_sequences)


def train_model(calibration=NOTHING_MEASURED, **options):
    return cost_models(grp_config(**options), calibration).train


@pytest.mark.parametrize(
    ("tp", "dp", "micro_batch_size", "measured_s"),
    [(1, 1, 2, 0.259), (1, 1, 4, 0.450), (1, 2, 4, 0.442), (2, 1, 4, 0.277)],
)
def test_predicted_steps_are_within_fifteen_percent_of_those_measured(
    tp, dp, micro_batch_size, measured_s
):
    model = train_model(
        arch=MEASURED_1_8B,
        hardware=H200_141G,
        training={"recompute_logprobs": False},
        megatron={"megatron_recompute_granularity": "none"},
    )
    layout = msgspec.structs.replace(ONE_RANK, tp=tp, dp=dp, micro_batch_size=micro_batch_size)
    cost = model.cost(layout, work_of(micro_batch_size * dp, 4096))
    assert cost.total_s == pytest.approx(measured_s, rel=0.15)


def test_a_larger_model_takes_longer_in_proportion_to_its_operations():
    small = train_model(arch=MEASURED_1_8B).cost(ONE_RANK, work_of(8, 4096)).total_s
    large = train_model(arch=QWEN3_14B).cost(ONE_RANK, work_of(8, 4096)).total_s
    assert 6 < large / small < 9


def test_a_mixture_costs_what_its_active_parameters_cost():
    mixture = train_model(arch=QWEN3_30B_A3B).cost(ONE_RANK, work_of(64, 4096)).total_s
    dense = train_model(arch=QWEN3_14B).cost(ONE_RANK, work_of(64, 4096)).total_s
    assert mixture < dense / 2


@pytest.mark.parametrize(
    "layout",
    [
        ONE_RANK,
        msgspec.structs.replace(ONE_RANK, tp=4, pp=4, dp=2),
        msgspec.structs.replace(ONE_RANK, tp=2, cp=2, dp=4, micro_batch_size=2),
    ],
)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.1])
def test_the_lower_bound_is_one(layout, kl_coefficient):
    config = grp_config()
    algorithm = msgspec.structs.replace(config.algorithm, kl_coefficient=kl_coefficient)
    config = msgspec.structs.replace(config, algorithm=algorithm)
    model = cost_models(config, NOTHING_MEASURED).train
    work = work_of(64, 5000)
    assert model.lower_bound_s(layout, work) <= model.cost(layout, work).total_s


def test_recomputing_logprobs_and_a_reference_policy_are_paid_for():
    config = grp_config()
    work = work_of(16, 4096, mini_batch_size=4)
    with_kl = msgspec.structs.replace(
        config, algorithm=msgspec.structs.replace(config.algorithm, kl_coefficient=0.1)
    )
    none = train_model(training={"recompute_logprobs": False}).cost(ONE_RANK, work)
    one = cost_models(config, NOTHING_MEASURED).train.cost(ONE_RANK, work)
    two = cost_models(with_kl, NOTHING_MEASURED).train.cost(ONE_RANK, work)
    assert none.recompute_logprobs_s == 0
    assert two.recompute_logprobs_s == pytest.approx(2 * one.recompute_logprobs_s)
    assert one.grpo_update_s == none.grpo_update_s


def test_with_one_mini_batch_the_update_s_own_forward_pass_recomputes_the_logprobs():
    model = train_model()
    assert model.cost(ONE_RANK, work_of(16, 4096)).recompute_logprobs_s == 0
    assert model.cost(ONE_RANK, work_of(16, 4096, mini_batch_size=8)).recompute_logprobs_s > 0


def test_tensor_parallelism_over_slow_links_costs_a_larger_share():
    fast = train_model(hardware=H200_141G)
    assert fast.tensor_comm_ratio(1) == 0
    assert fast.tensor_comm_ratio(8) > fast.tensor_comm_ratio(2)
    assert fast.tensor_comm_ratio(16) > 5 * fast.tensor_comm_ratio(8)


def test_an_expert_all_to_all_weighs_more_across_nodes():
    model = train_model(arch=QWEN3_30B_A3B)
    assert model.expert_comm_ratio(1, 1) == 0
    assert model.expert_comm_ratio(1, 16) > 5 * model.expert_comm_ratio(1, 8)


def test_offloading_the_optimizer_costs_time():
    offload = {"megatron_optimizer_cpu_offload": True, "megatron_optimizer_offload_fraction": 1.0}
    kept = train_model().cost(ONE_RANK, work_of(1, 1024)).total_s
    assert train_model(megatron=offload).cost(ONE_RANK, work_of(1, 1024)).total_s > kept + 1


def test_more_optimizer_steps_repeat_the_end_of_a_step_and_the_pipeline_fill():
    model, layout = train_model(), msgspec.structs.replace(ONE_RANK, tp=8, pp=4)
    once = model.cost(layout, work_of(64, 4096)).grpo_update_s
    four_times = model.cost(layout, work_of(64, 4096, mini_batch_size=16)).grpo_update_s
    assert four_times > once


def test_a_measured_phase_scales_its_prediction():
    factor = Factor(log_ratio=-0.6931471805599453, num_observations=3)
    halved = Calibration(hardware="", model="", factors={"grpo_update": factor})
    plain = train_model().cost(ONE_RANK, work_of(8, 4096))
    scaled = train_model(halved).cost(ONE_RANK, work_of(8, 4096))
    assert scaled.grpo_update_s == pytest.approx(plain.grpo_update_s / 2)
    assert scaled.recompute_logprobs_s == plain.recompute_logprobs_s


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_micro", [1, 3, 8])
def test_equal_micro_batches_take_the_textbook_time(num_stages, num_micro):
    stage = StageTimes(forward_s=[1.0] * num_micro, backward_s=[2.0] * num_micro)
    took = one_forward_one_backward_s([stage] * num_stages)
    assert took == 3 * (num_micro + num_stages - 1)
    assert 1 - 3 * num_micro / took == pytest.approx(bubble_fraction(num_stages, num_micro))


def test_one_long_micro_batch_delays_every_stage_behind_it():
    def stages(lengths):
        stage = StageTimes(forward_s=lengths, backward_s=[2 * length for length in lengths])
        return [stage] * 4

    even, uneven = [2.0] * 8, [1.0] * 7 + [9.0]
    assert sum(even) == sum(uneven)
    assert one_forward_one_backward_s(stages(uneven)) > one_forward_one_backward_s(stages(even))


def test_the_fullest_rank_has_at_least_the_mean_load():
    demand = Demand(prompt_tokens=(100,) * 12, response_tokens=tuple(range(1, 13)), source="test")
    tokens, squares = TrainWork(demand, mini_batch_size=12).micro_batches(4, 1)
    assert tokens.tolist() == [112, 105, 104]
    assert tokens.sum() >= sum(range(101, 113)) / 4
    assert squares.tolist() == [112**2, 105**2, 104**2]

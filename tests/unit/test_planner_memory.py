import msgspec
import pytest

from libra.config.rules.rollout import CPU_KV_CACHE_BYTES
from libra.models.kv_capacity import GIB, kv_bytes_per_token
from libra.models.parameters import rank_parameters
from libra.planner.calibration import Calibration, Factor
from libra.planner.cost_models import cost_models
from libra.planner.memory import MemoryBudget
from libra.planner.train_layout import TrainLayout
from planner_cases import H200_141G, MEASURED_1_8B, QWEN3_30B_A3B, grp_config

NOTHING_MEASURED = Calibration(hardware="", model="")
ONE_RANK = TrainLayout(tp=1, ep=1, pp=1, cp=1, dp=1, micro_batch_size=1)


def train_memory(calibration=NOTHING_MEASURED, **options):
    return cost_models(grp_config(**options), calibration).train_memory


def on_h200(**sections):
    """Megatron-Core as it was measured: no recompute, no sequence parallel, 4096 tokens."""
    return train_memory(
        arch=MEASURED_1_8B,
        hardware=H200_141G,
        max_new_tokens=2048,
        megatron={
            "megatron_recompute_granularity": "none",
            "megatron_sequence_parallel": False,
            **sections.pop("megatron", {}),
        },
        planner={"memory_budget_safety_margin_bytes": 0, **sections.pop("planner", {})},
        **sections,
    )


@pytest.mark.parametrize(("micro_batch_size", "measured_gib"), [(2, 56), (4, 82)])
def test_the_estimated_peak_is_within_three_percent_of_the_measured_one(
    micro_batch_size, measured_gib
):
    # The measured program had the logits of all rows at once.
    memory = on_h200(training={"recompute_micro_batch_size": micro_batch_size})
    layout = msgspec.structs.replace(ONE_RANK, micro_batch_size=micro_batch_size)
    total_gib = memory.budget(layout).total_bytes / GIB
    assert total_gib == pytest.approx(measured_gib, rel=0.03)


def test_a_budget_says_how_much_of_how_much_and_what_takes_most():
    budget = MemoryBudget(
        bytes_of={"parameters": 10 * GIB, "optimizer state": 71 * GIB + GIB // 5},
        capacity_bytes=72 * GIB,
    )
    assert not budget.fits
    assert str(budget) == "81.2 GiB of 72.0 GiB: optimizer state"


def test_recompute_temporaries_follow_the_reference_page():
    memory = on_h200(
        training={"recompute_micro_batch_size": 16},
        planner={"memory_budget_logits_dtype_bytes": 2, "memory_budget_workspace_factor": 3.0},
    )
    budget = memory.budget(ONE_RANK)
    rows, tokens, vocabulary = 16, 4096, 151936
    assert budget.bytes_of["recompute-logprobs temporaries"] == rows * tokens * vocabulary * 2 * 3


def test_without_the_check_recompute_temporaries_are_left_out():
    options = {"training": {"recompute_micro_batch_size": 64}}
    checked = on_h200(**options).budget(ONE_RANK)
    unchecked = on_h200(**options, planner={"memory_budget_check_enabled": False}).budget(ONE_RANK)
    assert "recompute-logprobs temporaries" in checked.bytes_of
    assert "recompute-logprobs temporaries" not in unchecked.bytes_of
    assert unchecked.total_bytes < checked.total_bytes


def test_no_more_rows_of_logits_than_recompute_has_live_at_once():
    wide = msgspec.structs.replace(ONE_RANK, micro_batch_size=8)
    one_row = on_h200().budget(wide).bytes_of["logits"]
    two_rows = on_h200(training={"recompute_micro_batch_size": 2}).budget(wide).bytes_of["logits"]
    assert two_rows - one_row == 4096 * 151936 * 4 * 2


def test_the_safety_margin_is_added_to_the_estimate():
    without = on_h200().budget(ONE_RANK).total_bytes
    margin = on_h200(planner={"memory_budget_safety_margin_bytes": 5 * GIB}).budget(ONE_RANK)
    assert margin.total_bytes == without + 5 * GIB


def with_reference(**options):
    memory = on_h200(**options)
    return memory, msgspec.structs.replace(memory, has_reference=True)


def test_a_kl_reference_is_a_second_model_without_gradients_or_optimizer_state():
    without, memory = with_reference()
    budget = memory.budget(ONE_RANK)
    assert budget.bytes_of["KL reference"] == budget.bytes_of["parameters"]
    assert budget.total_bytes == (
        without.budget(ONE_RANK).total_bytes + budget.bytes_of["parameters"]
    )


def test_scoring_a_reference_needs_what_recompute_needs_even_without_recompute():
    options = {"recompute_micro_batch_size": 64, "recompute_logprobs": False}
    without, memory = with_reference(training=options)
    assert "recompute-logprobs temporaries" not in without.budget(ONE_RANK).bytes_of
    assert "recompute-logprobs temporaries" in memory.budget(ONE_RANK).bytes_of


def test_the_configuration_s_kl_term_says_whether_there_is_a_reference():
    config = grp_config()
    assert not cost_models(config, NOTHING_MEASURED).train_memory.has_reference
    algorithm = msgspec.structs.replace(config.algorithm, kl_coefficient=0.1)
    config = msgspec.structs.replace(config, algorithm=algorithm)
    assert cost_models(config, NOTHING_MEASURED).train_memory.has_reference


def optimizer_bytes(layout=ONE_RANK, **megatron):
    return on_h200(megatron=megatron).budget(layout).bytes_of["optimizer state"]


def test_optimizer_state_is_sharded_over_data_parallel_ranks_when_distributed():
    eight = msgspec.structs.replace(ONE_RANK, dp=8)
    whole = optimizer_bytes()
    assert optimizer_bytes(eight) == pytest.approx(whole / 8, abs=1)
    assert optimizer_bytes(eight, megatron_use_distributed_optimizer=False) == whole


def test_offloaded_and_precision_aware_state_leave_the_device():
    whole = optimizer_bytes()
    offloaded = optimizer_bytes(
        megatron_optimizer_cpu_offload=True, megatron_optimizer_offload_fraction=0.75
    )
    assert offloaded == pytest.approx(whole / 4, abs=1)
    aware = optimizer_bytes(megatron_use_precision_aware_optimizer=True)
    assert aware == pytest.approx(whole * 10 / 12, abs=1)


def activation_bytes(layout=ONE_RANK, **megatron):
    return on_h200(megatron=megatron).budget(layout).bytes_of["activations"]


def test_full_recompute_keeps_far_less_than_none():
    assert activation_bytes(megatron_recompute_granularity="full") < activation_bytes() / 8


def test_sequence_parallel_splits_what_tensor_parallel_alone_keeps_whole():
    pair = msgspec.structs.replace(ONE_RANK, tp=2)
    alone, both = activation_bytes(pair), activation_bytes(pair, megatron_sequence_parallel=True)
    assert both == activation_bytes() // 2
    assert both < alone < activation_bytes()


def test_the_first_pipeline_stage_keeps_a_micro_batch_for_every_stage():
    deep = msgspec.structs.replace(ONE_RANK, pp=4)
    assert activation_bytes(deep) == activation_bytes()


def test_context_parallel_divides_activations_and_logits():
    whole = on_h200().budget(ONE_RANK).bytes_of
    half = on_h200().budget(msgspec.structs.replace(ONE_RANK, cp=2)).bytes_of
    assert half["activations"] == whole["activations"] // 2
    head_gradient = 151936 * 1536 * 4
    assert half["logits"] - head_gradient == (whole["logits"] - head_gradient) // 2


def test_expert_parallel_divides_the_weights_of_a_mixture():
    memory = train_memory(arch=QWEN3_30B_A3B)
    layout = msgspec.structs.replace(ONE_RANK, dp=8)
    whole = memory.budget(layout).bytes_of["parameters"]
    split = memory.budget(msgspec.structs.replace(layout, ep=8)).bytes_of["parameters"]
    assert split < whole / 5


def test_the_optimizer_state_of_experts_is_shared_by_those_who_hold_the_same_ones():
    memory = train_memory(arch=QWEN3_30B_A3B)
    layout = msgspec.structs.replace(ONE_RANK, dp=8, ep=4)
    dense, experts = rank_parameters(QWEN3_30B_A3B, tp=1, pp=1, ep=4)
    state = memory.budget(layout).bytes_of["optimizer state"]
    assert state == pytest.approx(12 * (dense / 8 + experts / 2), abs=1)


def test_context_parallel_divides_the_recompute_pass():
    memory = on_h200(training={"recompute_micro_batch_size": 64})
    item = "recompute-logprobs temporaries"
    whole = memory.budget(ONE_RANK).bytes_of
    half = memory.budget(msgspec.structs.replace(ONE_RANK, cp=2)).bytes_of
    assert half[item] == whole[item] // 2
    assert half["activations"] == whole["activations"] // 2


def test_a_measured_peak_corrects_what_is_not_static():
    factor = Factor(log_ratio=0.6931471805599453, num_observations=1)
    doubled = Calibration(hardware="", model="", factors={"train_memory": factor})
    plain = train_memory().budget(ONE_RANK).bytes_of
    corrected = train_memory(doubled).budget(ONE_RANK).bytes_of
    assert corrected["activations"] == pytest.approx(2 * plain["activations"], abs=2)
    assert corrected["parameters"] == plain["parameters"]


def test_a_rollout_worker_holds_weights_and_the_cache_of_its_own_heads():
    memory = cost_models(grp_config(), NOTHING_MEASURED).rollout_memory
    one, four = memory.kv_capacity_tokens(1), memory.kv_capacity_tokens(4)
    whole = (int(80 * GIB * 0.9) - 14_768_307_200 * 2 - 4 * GIB) // 163_840
    assert one == pytest.approx(whole, abs=2)
    assert four > 4 * one


def test_the_configured_cache_size_wins_over_the_estimate():
    config = grp_config(rollout={"rollout_kv_cache_bytes": 163_840 * 1000})
    assert cost_models(config, NOTHING_MEASURED).rollout_memory.kv_capacity_tokens(1) == 1000


def test_on_the_cpu_an_engine_s_cache_is_as_large_as_it_is_started_with():
    config = grp_config()
    on_cpu = msgspec.structs.replace(
        config, control=msgspec.structs.replace(config.control, device="cpu")
    )
    memory = cost_models(on_cpu, NOTHING_MEASURED).rollout_memory
    per_token = kv_bytes_per_token(memory.arch, tp=1, kv_dtype_bytes=2)
    assert memory.kv_capacity_tokens(1) == CPU_KV_CACHE_BYTES // per_token
    assert memory.budget(1).bytes_of["activation reserve"] == 0


def test_weights_that_leave_no_room_make_no_capacity():
    memory = cost_models(
        grp_config(rollout={"gpu_memory_utilization": 0.3}), NOTHING_MEASURED
    ).rollout_memory
    assert memory.kv_capacity_tokens(1) == 0
    assert not memory.budget(1).fits

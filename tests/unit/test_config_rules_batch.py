import pytest

from config_files import broken_rules, config_from, only_problem, warnings_of
from libra.config.arithmetic import (
    batch_equation,
    nearest_divisors,
    nearest_multiples,
    steps_per_epoch,
)
from libra.config.training import MegatronConfig

PLANNER = "global_resource_planner"


@pytest.mark.case("T-B01")
def test_a_mini_batch_counts_samples_and_not_prompts():
    options = {"batch_size": "32", "n_samples": "4"}
    in_samples = batch_equation(config_from(**options, mini_batch_size="16"))
    assert (in_samples.prompts, in_samples.samples, in_samples.optimizer_steps) == (8, 32, 2)
    assert in_samples.samples_per_optimizer_step == 16
    assert not broken_rules(**options, mini_batch_size="16")
    # Read as prompts, 16 of them would be 64 samples: twice the batch.
    problem = only_problem(**options, mini_batch_size="64")
    assert problem.path == "mini_batch_size"
    assert "32 samples (batch_size)" in problem.what


@pytest.mark.case("T-B02")
def test_a_batch_that_does_not_divide_over_ranks_lists_the_nearest_of_each_side():
    problem = only_problem(batch_size="24", n_samples="4", train_gpus="5")
    assert problem.path == "batch_size"
    assert "24 samples does not divide over 5 data-parallel ranks x 1" in problem.what
    assert problem.hint == (
        "nearest: batch_size 20 or 40, or data-parallel size 4 or 6 (train_gpus 4 or 6)"
    )


def test_the_nearest_valid_sizes_are_valid():
    for batch_size in ("20", "40"):
        assert not broken_rules(batch_size=batch_size, n_samples="4", train_gpus="5")
    for train_gpus in ("4", "6"):
        assert not broken_rules(batch_size="24", n_samples="4", train_gpus=train_gpus)


def test_the_nearest_sizes_of_a_mini_batch_are_named_for_it():
    problem = only_problem(batch_size="24", mini_batch_size="12", train_gpus="8", train_tp_size="1")
    assert problem.path == "mini_batch_size"
    assert "mini_batch_size 8 or 16" in problem.hint
    assert "(train_gpus 6 or 12)" in problem.hint


def test_a_mini_batch_below_one_pass_names_what_divides():
    problem = only_problem(batch_size="8", micro_batch_size="3", train_gpus="2")
    assert problem.hint == "nearest: batch_size 12, or micro_batch_size 2 or 4"


def test_tensor_parallel_ranks_share_a_sample():
    assert not broken_rules(batch_size="8", train_gpus="4", train_tp_size="2", micro_batch_size="4")
    problem = only_problem(batch_size="8", train_gpus="4", micro_batch_size="4", train_tp_size="1")
    assert "micro_batch_size 2" in problem.hint


@pytest.mark.case("T-B09")
def test_a_rollout_of_128_samples_and_a_mini_batch_of_64_are_two_steps():
    config = config_from(batch_size="128", n_samples="8", mini_batch_size="64")
    equation = batch_equation(config)
    assert (equation.prompts, equation.samples_per_prompt) == (16, 8)
    assert (equation.samples, equation.optimizer_steps) == (128, 2)
    assert "mini_batch_size" in broken_rules(batch_size="128", mini_batch_size="48")


def test_a_batch_holds_whole_groups():
    problem = only_problem(batch_size="30", n_samples="8")
    assert problem.hint == "nearest: batch_size 24 or 32, or n_samples 6 or 10"


def test_an_equation_of_parts_is_an_error():
    with pytest.raises(ValueError, match="whole parts"):
        batch_equation(config_from(batch_size="30", n_samples="8"))


def test_steps_per_epoch_need_not_be_whole():
    assert steps_per_epoch(config_from(batch_size="32", n_samples="8"), rows=250) == 62.5


def test_recompute_cannot_take_more_than_a_ranks_share():
    problem = only_problem(batch_size="8", train_gpus="2", recompute_micro_batch_size="5")
    assert problem.hint == "nearest: 4"


def test_something_must_stop_the_run():
    assert only_problem(total_steps="null").path == "total_steps"
    assert not broken_rules(total_steps="null", epochs="1")
    assert not broken_rules(total_steps="null", max_run_s="60")


def test_a_decaying_learning_rate_has_an_end_after_its_warm_up():
    assert (
        only_problem(lr_schedule="cosine", total_steps="null", epochs="1").path == "lr_decay_steps"
    )
    assert not broken_rules(lr_schedule="cosine", lr_warmup_steps="3")
    problem = only_problem(lr_schedule="linear", lr_decay_steps="10", lr_warmup_steps="10")
    assert problem.hint == "at most 9"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"clip_ratio_dual": "0.5"}, "clip_ratio_dual"),
        ({"clip_ratio_low": "1.2"}, "clip_ratio_low"),
        (
            {"importance_correction": "icepop", "importance_floor": "2", "importance_cap": "2"},
            "importance_floor",
        ),
        ({"n_samples": "1"}, "n_samples"),
    ],
)
def test_objectives_that_cannot_learn_are_refused(options: dict[str, str], path: str):
    assert only_problem(**options).path == path


def test_a_correction_without_recomputed_logprobs_is_warned_about():
    assert "importance_correction" in warnings_of(recompute_logprobs="false")
    assert not warnings_of(recompute_logprobs="false", importance_correction="none")


def test_the_planners_budget_need_not_divide_the_batch():
    text = f"{PLANNER}: {{initial_allocation_strategy: grp}}"
    assert not broken_rules(text, train_gpus="7")
    assert batch_equation(config_from(text, train_gpus="7")).data_parallel_size is None


@pytest.mark.parametrize("value", range(1, 40))
def test_nearest_values_surround_and_divide(value: int):
    assert all(n % 6 == 0 and abs(n - value) <= 6 for n in nearest_multiples(value, 6))
    divisors = nearest_divisors(value, 36)
    assert all(36 % n == 0 for n in divisors)
    assert (value in divisors) == (36 % value == 0)


def test_the_nearest_sizes_of_an_enormous_batch_take_no_time():
    assert nearest_divisors(7, 9 * 10**18) == (6, 8)
    assert nearest_divisors(8, 2**61 - 1) == (1, 2**61 - 1)


def test_a_warm_up_ends_before_a_decay_derived_from_total_steps():
    problem = only_problem(lr_schedule="cosine", total_steps="5", lr_warmup_steps="5")
    assert (problem.path, problem.hint) == ("lr_warmup_steps", "at most 4")
    halves = {"lr_schedule": "cosine", "total_steps": "5", "mini_batch_size": "4"}
    assert not broken_rules(**halves, lr_warmup_steps="9")


def test_offloading_none_of_the_optimizer_is_no_offloading():
    problem = only_problem(
        megatron_optimizer_cpu_offload="true", megatron_optimizer_offload_fraction="0"
    )
    assert problem.related == ("megatron_optimizer_offload_fraction",)
    assert not broken_rules(megatron_optimizer_cpu_offload="true")
    assert config_from(megatron_optimizer_cpu_offload="true").megatron == MegatronConfig(
        megatron_optimizer_cpu_offload=True, megatron_optimizer_offload_fraction=1.0
    )


def test_the_planner_chooses_the_micro_batch():
    text = "global_resource_planner: {initial_allocation_strategy: grp}"
    equation = batch_equation(config_from(text, micro_batch_size="3"))
    assert equation.micro_batches_per_rank is None

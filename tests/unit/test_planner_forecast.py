import pytest
from msgspec.structs import replace

from libra.planner.calibration import Calibration, Observation, observe
from libra.planner.cost_models import cost_models
from libra.planner.forecast import (
    RunningPlan,
    ServingUse,
    StepSeen,
    error_fraction,
    forecast_of,
    observations_of,
)
from libra.planner.rollout_cost import step_seconds
from libra.planner.train_layout import TrainLayout
from planner_cases import H200_141G, MEASURED_1_8B, grp_config

EMPTY = Calibration(hardware="NVIDIA H200", model="m")
CONFIG = grp_config(
    num_gpus=8,
    arch=MEASURED_1_8B,
    hardware=H200_141G,
    batch_size=64,
    max_new_tokens=2048,
    training={"mini_batch_size": 16},
)
RUNNING = RunningPlan(
    config=CONFIG,
    layout=TrainLayout(tp=1, ep=1, pp=1, cp=1, dp=4, micro_batch_size=1),
    tps=(1, 1, 1, 1),
)
LENGTHS = ((200, 1000), (200, 400)) * 32
QUIET = StepSeen(
    batch=LENGTHS,
    finished=LENGTHS,
    recompute_s=1.0,
    update_s=1.0,
    rollout_s=1.0,
    export_s=1.0,
    sync_s=1.0,
    peak_bytes=None,
    longest_tokens=1200,
)


def corrected(book, operation, ratio):
    return observe(book, Observation(operation=operation, predicted=1.0, measured=ratio))


def observed(seen, book=EMPTY):
    return {o.operation: o for o in observations_of(RUNNING, book, seen)}


def test_of_rollout_nothing_is_expected_while_nothing_serves():
    lent = replace(RUNNING, tps=())
    found = forecast_of(lent, EMPTY, QUIET)
    assert found.rollout_s is None
    assert found.train_s == forecast_of(RUNNING, EMPTY, QUIET).train_s
    assert "weight_sync" not in {it.operation for it in observations_of(lent, EMPTY, QUIET)}


def test_a_step_that_took_twice_as_long_as_modelled_teaches_a_factor_of_two():
    modelled = forecast_of(RUNNING, EMPTY, QUIET)
    found = observed(QUIET)
    slow = replace(
        QUIET,
        recompute_s=2 * found["recompute_logprobs"].predicted,
        update_s=2 * found["grpo_update"].predicted,
    )
    book = EMPTY
    for observation in observations_of(RUNNING, book, slow):
        book = observe(book, observation)
    assert book.ratio("grpo_update") == pytest.approx(2)
    assert book.ratio("recompute_logprobs") == pytest.approx(2)
    again = forecast_of(RUNNING, book, slow)
    assert again.train_s == pytest.approx(2 * modelled.train_s)
    measured = slow.recompute_s + slow.update_s
    assert error_fraction(predicted=again.train_s, measured=measured) == pytest.approx(0)


def test_the_forecast_is_for_the_lengths_that_there_were():
    longer = tuple((prompt, 2 * response) for prompt, response in LENGTHS)
    short = forecast_of(RUNNING, EMPTY, QUIET)
    long = forecast_of(RUNNING, EMPTY, replace(QUIET, batch=longer, finished=longer))
    assert 1.5 < long.train_s / short.train_s < 2.5
    assert 1.5 < long.rollout_s / short.rollout_s < 2.5


def test_a_step_in_which_nothing_ended_has_no_rollout_forecast():
    assert forecast_of(RUNNING, EMPTY, replace(QUIET, finished=())).rollout_s is None


def test_an_operation_that_was_not_done_teaches_nothing():
    done_once = replace(RUNNING, config=grp_config(
        num_gpus=8, arch=MEASURED_1_8B, hardware=H200_141G, batch_size=64, max_new_tokens=2048
    ))  # fmt: skip
    seen = replace(QUIET, recompute_s=0.001, sync_s=0.0)
    operations = {o.operation for o in observations_of(done_once, EMPTY, seen)}
    assert operations == {"grpo_update", "weight_export"}


def test_memory_beyond_what_parameters_and_optimizer_take_corrects_activations():
    memory = replace(cost_models(CONFIG, EMPTY).train_memory, max_model_len=1200)
    static, recompute = memory.recompute_peak_bytes(RUNNING.layout)
    update = memory.update_bytes(RUNNING.layout)
    assert update > recompute - static
    found = observed(replace(QUIET, peak_bytes=static + 3 * update))["train_memory"]
    assert found.measured / found.predicted == pytest.approx(3)
    expected = forecast_of(RUNNING, EMPTY, replace(QUIET, peak_bytes=1)).peak_bytes
    assert expected == static + update
    assert "train_memory" not in observed(replace(QUIET, peak_bytes=static - 1))


def serving(*, latency_s, num_prompt_tokens=0.0):
    """A hundred engine steps of sixteen sequences on TP 1."""
    return ServingUse(
        tp=1,
        latency_s=latency_s,
        num_latencies=1600.0,
        num_engine_steps=100.0,
        num_generated_tokens=1600.0,
        num_computed_prompt_tokens=num_prompt_tokens,
    )


def modelled_step_s():
    cost = cost_models(CONFIG, EMPTY).instance.cost(1)
    # Every second sequence is 1000 long: a mean step finds 200 + 414 tokens.
    context = sum(p * n + n * (n + 1) / 2 for p, n in LENGTHS) / sum(n for _, n in LENGTHS)
    return step_seconds(cost, num_sequences=16.0, cached_tokens=16 * context)


def test_engines_that_decode_half_as_fast_as_modelled_teach_a_factor_of_two():
    use = serving(latency_s=2 * 1600 * modelled_step_s())
    found = observed(replace(QUIET, serving=(use,)))["rollout_decode"]
    assert found.measured / found.predicted == pytest.approx(2)


def test_prompts_computed_beside_decoding_are_not_taken_for_it():
    prompt_s = cost_models(CONFIG, EMPTY).instance.cost(1).prompt_token_s
    decode_s = 1600 * modelled_step_s()
    num_prompt_tokens = 100 * 0.5 * modelled_step_s() / prompt_s
    use = serving(latency_s=2.5 * decode_s, num_prompt_tokens=num_prompt_tokens)
    found = observed(replace(QUIET, serving=(use,)))["rollout_decode"]
    assert found.measured / found.predicted == pytest.approx(2)


def test_engine_steps_full_of_prompts_correct_prefill_with_decode_as_it_is_known():
    prompt_s = cost_models(CONFIG, EMPTY).instance.cost(1).prompt_token_s
    num_prompt_tokens = 100 * 3 * modelled_step_s() / prompt_s
    decode_s = 1600 * modelled_step_s()
    use = serving(latency_s=decode_s + 2 * 3 * decode_s, num_prompt_tokens=num_prompt_tokens)
    found = observed(replace(QUIET, serving=(use,)))
    assert "rollout_decode" not in found
    assert found["rollout_prefill"].measured / found["rollout_prefill"].predicted == pytest.approx(
        2
    )
    # Twice as slow at decoding, the same latency leaves less for prompts.
    known = corrected(EMPTY, "rollout_decode", 2.0)
    less = observed(replace(QUIET, serving=(use,)), known)["rollout_prefill"]
    assert less.measured / less.predicted == pytest.approx(5 / 3)


def test_engines_that_did_nothing_teach_nothing():
    assert not {"rollout_decode", "rollout_prefill"} & observed(QUIET).keys()

from config_files import config_from
from libra.config.problems import Place
from libra.config.resume import FIXED, FREE, check_resume, reason_fixed
from libra.config.surface import all_options


def test_every_option_is_either_fixed_or_free():
    for path in all_options():
        whole = f"{path.partition('.')[0]}.*"
        is_fixed, is_free = path in FIXED or whole in FIXED, path in FREE or whole in FREE
        assert is_fixed != is_free, path


def test_the_tables_name_options_only():
    tops = {path.partition(".")[0] for path in all_options()}
    for path in (*FIXED, *FREE):
        assert path in all_options() or path.removesuffix(".*") in tops


def test_a_resumed_run_may_learn_at_another_rate_for_longer():
    old = config_from()
    new = config_from(learning_rate="1e-5", total_steps="50", rollout_gpus="3")
    assert not check_resume(old, new, place_of={})


def test_a_resumed_run_may_be_laid_out_anew_but_for_experts_that_are_spread_over_ranks():
    old = config_from(train_gpus="2")
    new = config_from(train_gpus="4", train_tp_size="2", train_pp_size="2")
    assert not check_resume(old, new, place_of={})
    spread = config_from(train_gpus="4", train_ep_size="2")
    (found,) = check_resume(old, spread, place_of={})
    assert (found.path, "an optimizer of their own" in found.what) == ("train_ep_size", True)


def test_a_resumed_run_keeps_its_seed_and_batch():
    place = Place("run.yaml", 3)
    found = check_resume(
        config_from(), config_from(seed="1", batch_size="16"), place_of={"seed": place}
    )
    assert {problem.path for problem in found} == {"seed", "batch_size"}
    seed = next(problem for problem in found if problem.path == "seed")
    assert (seed.place, seed.what.startswith("was 0 and is now 1")) == (place, True)


def test_the_reason_is_given():
    assert reason_fixed("model_arch.num_layers") == "v0 is this model"
    assert reason_fixed("api.api_port") is None

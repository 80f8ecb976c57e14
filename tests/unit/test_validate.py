import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from config_files import load, write_run
from libra.config.load import load_config
from libra.config.run import RunConfig
from libra.errors import DataError
from libra.models.parameters import total_parameters
from libra_supervisor.validate.dataset import summarize_dataset
from libra_supervisor.validate.memory import estimate_memory
from libra_supervisor.validate.ports import DatasetSummary, RoleMemory
from libra_supervisor.validate.verb import Output, Request, schema, validate


def summary(**changes: object) -> DatasetSummary:
    said: dict[str, object] = {
        "rows": 250,
        "skipped_rows": 0,
        "over_long_prompts": 0,
        "longest_prompt_tokens": 12,
        "example_token_ids": (1, 5, 9),
        "example_tokens": ("<u>", "2", "+2"),
    }
    return DatasetSummary(**{**said, **changes})  # type: ignore[arg-type]


def run(path: Path, *overrides: str, as_json: bool = False, **ports: object) -> Output:
    request = Request(path=path, overrides=overrides, as_json=as_json)
    return validate(request, **ports)  # type: ignore[arg-type]


@pytest.mark.case("T-B01")
def test_the_batch_equation_is_in_prompts_samples_and_optimizer_steps(tmp_path: Path):
    path = write_run(tmp_path, batch_size="32", n_samples="4", mini_batch_size="16")
    out = run(path, "train_gpus=2", "micro_batch_size=4")
    assert out.exit_code == 0
    assert "8 prompts x 4 samples = 32 samples = 2 optimizer steps x 16 samples" in out.stdout
    assert "one optimizer step = 2 data-parallel ranks x 8 samples; " in out.stdout
    assert "a rank takes 2 micro-batches x 4 samples" in out.stdout


@pytest.mark.case("T-B09")
def test_128_samples_in_mini_batches_of_64_are_2_steps_per_rollout(tmp_path: Path):
    path = write_run(tmp_path, batch_size="128", n_samples="8", mini_batch_size="64")
    out = run(path)
    assert "16 prompts x 8 samples = 128 samples = 2 optimizer steps x 64 samples" in out.stdout
    refused = run(path, "mini_batch_size=48")
    assert refused.exit_code == 2
    assert "no whole number of optimizer steps" in refused.stderr


def test_every_value_has_its_origin(tmp_path: Path):
    out = run(write_run(tmp_path), "seed=7", "reward_args={a: 'x: y'}")
    assert f"batch_size: 8  # {tmp_path}/run.yaml:4" in out.stdout
    assert "seed: 7  # -o seed=7" in out.stdout
    assert 'reward_args: {a: "x: y"}  # -o' in out.stdout
    assert "learning_rate: 1e-06  # default" in out.stdout
    assert f"model_arch.num_layers: 2  # {tmp_path}/model/config.json" in out.stdout
    assert "hardware." not in out.stdout


def test_what_is_in_flight_and_on_which_devices_is_said(tmp_path: Path):
    text = "heterogeneous_rollout: {instances: [{tp: 1, count: 2}, {tp: 2, count: 1}]}"
    out = run(write_run(tmp_path, text), "rollout_gpus=4", "train_gpus=2", "train_tp_size=2")
    assert "in flight at most: 2 versions, 16 trajectories" in out.stdout
    assert "training: 2 = TP 2 x PP 1 x CP 1 x DP 1" in out.stdout
    assert "rollout: 2 x TP 1, 1 x TP 2" in out.stdout


def test_warnings_are_shown_and_do_not_fail(tmp_path: Path):
    out = run(write_run(tmp_path), "global_resource_planner.elastic_hybrid_max_workers=4")
    assert out.exit_code == 0
    assert "elastic_hybrid_max_workers: is deprecated and ignored" in out.stdout


def test_problems_go_to_standard_error_with_exit_code_2(tmp_path: Path):
    out = run(write_run(tmp_path), "seed=x", "bach_size=1")
    assert (out.exit_code, out.stdout) == (2, "")
    assert "2 problems in the configuration" in out.stderr


def test_programs_get_strict_json(tmp_path: Path):
    path = write_run(tmp_path)
    found = json.loads(run(path, as_json=True).stdout, parse_constant=pytest.fail)
    assert found["ok"] is True
    assert found["batch"]["samples"] == 8
    assert found["options"]["seed"] == {"value": 0, "origin": "default"}
    planner = "global_resource_planner"
    assert found["options"][f"{planner}.train_comm_compute_ratio_threshold"]["value"] == ".inf"
    out = run(path, "seed=x", as_json=True)
    assert (out.exit_code, out.stderr) == (2, "")
    problem = json.loads(out.stdout)["problems"][0]
    assert (problem["path"], problem["where"]) == ("seed", "-o seed=x")


def test_unbounded_staleness_is_said_in_words_and_null_in_json(tmp_path: Path):
    path = write_run(tmp_path, max_head_offpolicyness=".inf")
    assert "any number of policy versions, 256 trajectories" in run(path).stdout
    assert json.loads(run(path, as_json=True).stdout)["max_policy_versions_in_flight"] is None


def test_the_planners_choices_are_left_open(tmp_path: Path):
    text = "global_resource_planner: {initial_allocation_strategy: grp}"
    request = Request(path=write_run(tmp_path, text), purpose="plan")
    out = validate(request)
    assert out.exit_code == 0
    assert "is the planner's choice" in out.stdout
    assert "the planner divides them" in out.stdout


def test_data_gives_steps_per_epoch_and_one_prompt_as_tokens(tmp_path: Path):
    path = write_run(tmp_path, epochs="2", total_steps="null")
    out = run(path, summarize_dataset=lambda _config: summary())
    assert "steps per epoch = 250 rows / 2 prompts = 125" in out.stdout
    assert "the run stops after 250 training steps" in out.stdout
    assert "one prompt, 3 tokens:" in out.stdout
    assert "1:'<u>' 5:'2' 9:'+2'" in out.stdout


def test_a_long_example_is_shortened_in_the_middle(tmp_path: Path):
    long = summary(example_token_ids=tuple(range(300)), example_tokens=("t",) * 300)
    out = run(write_run(tmp_path), summarize_dataset=lambda _config: long)
    assert "63:'t' ... 172 more ... 236:'t'" in out.stdout


def test_skipped_rows_are_counted_and_warned_about(tmp_path: Path):
    skipped = summary(over_long_prompts=3, skipped_rows=2)
    out = run(write_run(tmp_path), summarize_dataset=lambda _config: skipped)
    assert "250 rows, 2 skipped, 3 over-long; the longest prompt has 12 tokens" in out.stdout
    assert "train_data: 3 over-long prompts are left out (on_long_prompt: skip)" in out.stdout
    assert "train_data: 2 rows are left out (on_bad_row: skip)" in out.stdout


@pytest.mark.case("T-B41")
def test_fewer_rows_than_a_step_takes_are_warned_about(tmp_path: Path):
    path = write_run(tmp_path, batch_size="32")
    out = run(path, summarize_dataset=lambda _config: summary(rows=3))
    assert out.exit_code == 0
    assert "3 rows are fewer than the 8 prompts of one step" in out.stdout


@pytest.mark.case("T-B39")
def test_broken_data_is_a_problem_of_its_key(tmp_path: Path):
    def broken(config: RunConfig) -> DatasetSummary:
        raise DataError(f"{config.data.train_data}:3:5: not JSON")

    out = run(write_run(tmp_path), summarize_dataset=broken)
    assert out.exit_code == 2
    assert f"train_data: {tmp_path}/d.jsonl:3:5: not JSON" in out.stderr


def test_memory_is_shown_by_role(tmp_path: Path):
    role = RoleMemory(
        role="trainer rank",
        bytes_by_part={"weights": 2**30, "logits": 2**29, "none": 0},
        limit_bytes=4 * 2**30,
    )
    out = run(write_run(tmp_path), estimate_memory=lambda _config: [role])
    assert "trainer rank: 1.50 GiB of 4.00 GiB (weights 1.00 GiB, logits 512.0 MiB)" in out.stdout


def test_the_schema_is_printed_as_json():
    assert json.loads(schema().stdout)["type"] == "object"


def test_a_name_that_no_built_in_has_is_corrected(tmp_path: Path):
    out = run(write_run(tmp_path), "reward=exact_mach", "workflow=chess")
    assert out.exit_code == 2
    assert "there is no built-in reward 'exact_mach'; did you mean exact_match?" in out.stderr
    assert "use one of multi_turn, single_turn, or module:function" in out.stderr


def test_memory_of_the_configured_layout_is_the_planners_estimate(tmp_path: Path):
    path = write_run(tmp_path, train_dtype="float32")
    config = load(path, "device=cpu", "max_model_len=512", "max_new_tokens=64").config
    trainer, worker = estimate_memory(config)
    assert config.model_arch is not None
    weights = 4 * total_parameters(config.model_arch)
    assert trainer.bytes_by_part["parameters"] == weights
    assert trainer.bytes_by_part["optimizer state"] == 2 * weights
    assert worker.role == "engine worker, TP 1"
    assert worker.bytes_by_part["weights"] == weights
    assert worker.bytes_by_part["KV cache"] == 64 * 2**20
    assert (trainer.limit_bytes, worker.limit_bytes) == (None, None)


def test_memory_is_left_out_while_the_planner_is_to_choose(tmp_path: Path):
    text = "global_resource_planner: {initial_allocation_strategy: grp}"
    assert not estimate_memory(load_config(write_run(tmp_path, text), purpose="plan").config)


# The real data


def write_tokenizer(directory: Path, template: str = "<s>{{ messages[0].content }}") -> None:
    words = {"<unk>": 0, "<s>": 1, "two": 2, "plus": 3, "three": 4}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def write_rows(path: Path, *prompts: object) -> None:
    path.write_text("".join(json.dumps({"prompt": p, "answer": "5"}) + "\n" for p in prompts))


def test_real_data_is_counted_and_its_first_prompt_shown_with_special_tokens(tmp_path: Path):
    path = write_run(tmp_path)
    write_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "d.jsonl", "two plus three", "two", "three three three three three")
    out = run(path, summarize_dataset=summarize_dataset)
    assert "3 rows, 0 skipped, 0 over-long; the longest prompt has 6 tokens" in out.stdout
    assert "1:'<s>' 2:'two' 3:'plus' 4:'three'" in out.stdout
    assert "steps per epoch = 3 rows / 2 prompts = 1.5" in out.stdout


@pytest.mark.case("T-B39")
def test_a_bad_row_of_real_data_is_named_by_line(tmp_path: Path):
    path = write_run(tmp_path)
    write_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "d.jsonl", "two", 5)
    out = run(path, summarize_dataset=summarize_dataset)
    assert out.exit_code == 2
    assert "run.yaml:2: train_data: " in out.stderr
    assert f"{tmp_path}/d.jsonl:2:1: 'prompt' is 5" in out.stderr
    skipped = run(path, "on_bad_row=skip", summarize_dataset=summarize_dataset)
    assert "1 row, 1 skipped" in skipped.stdout


@pytest.mark.case("T-B39")
def test_a_bad_row_of_the_evaluation_s_data_is_named_under_its_own_key(tmp_path: Path):
    path = write_run(tmp_path, eval_data="e.jsonl")
    write_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "d.jsonl", "two")
    write_rows(tmp_path / "e.jsonl", "two", 5)
    out = run(path, summarize_dataset=summarize_dataset)
    assert out.exit_code == 2
    assert "eval_data: " in out.stderr
    assert "train_data: " not in out.stderr
    assert f"{tmp_path}/e.jsonl:2:1: 'prompt' is 5" in out.stderr


def test_an_over_long_prompt_of_real_data_is_named_by_line(tmp_path: Path):
    path = write_run(tmp_path)
    write_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "d.jsonl", "two", "two plus three two")
    out = run(path, "max_model_len=8", "max_new_tokens=4", summarize_dataset=summarize_dataset)
    assert out.exit_code == 2
    assert f"{tmp_path}/d.jsonl:2" in out.stderr
    assert "5 tokens, the most is 4" in out.stderr


def test_a_broken_tokenizer_is_a_fault_of_the_option_that_names_it(tmp_path: Path):
    path = write_run(tmp_path)
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    out = run(path, summarize_dataset=summarize_dataset)
    assert out.exit_code == 2
    assert f"run.yaml:1: model_path: {tmp_path}/model/tokenizer.json: " in out.stderr
    out = run(path, "tokenizer_path=model", summarize_dataset=summarize_dataset)
    assert "-o tokenizer_path=model: tokenizer_path: " in out.stderr


SHOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}"
    "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
)
WITH_TOOLS = (
    "workflow=multi_turn",
    "workflow_args={tools: ['user_workflows:add', 'user_workflows:slow']}",
)


def test_a_prompt_is_as_long_as_the_workflow_sends_it_with_its_tools(tmp_path: Path):
    path = write_run(tmp_path)
    write_tokenizer(tmp_path / "model", SHOWS_TOOLS)
    write_rows(tmp_path / "d.jsonl", "two plus three")
    limits = ("max_model_len=9", "max_new_tokens=4")
    assert "4 tokens" in run(path, *limits, summarize_dataset=summarize_dataset).stdout
    out = run(path, *limits, *WITH_TOOLS, summarize_dataset=summarize_dataset)
    assert out.exit_code == 2
    assert "d.jsonl:1:1: 6 tokens, tools included, the most is 5" in out.stderr
    roomy = run(
        path, "max_model_len=10", *limits[1:], *WITH_TOOLS, summarize_dataset=summarize_dataset
    )
    assert "the longest prompt has 6 tokens" in roomy.stdout


def test_plain_text_has_no_tools_in_it(tmp_path: Path):
    path = write_run(tmp_path, apply_chat_template="false")
    write_tokenizer(tmp_path / "model", SHOWS_TOOLS)
    write_rows(tmp_path / "d.jsonl", "two plus three")
    out = run(path, *WITH_TOOLS, summarize_dataset=summarize_dataset)
    assert "the longest prompt has 3 tokens" in out.stdout
    out = run(
        path,
        *WITH_TOOLS,
        "max_model_len=6",
        "max_new_tokens=4",
        summarize_dataset=summarize_dataset,
    )
    assert "d.jsonl:1:1: 3 tokens, the most is 2" in out.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("workflow=multi_turn",), "workflow_args: multi_turn(task, client, ...): missing a"),
        (("workflow=user_workflows:gone",), "workflow: user_workflows:gone: module user_workflows"),
        (("workflow=multi_turn", "workflow_args={tools: []}"), "workflow: multi_turn cannot give"),
    ],
)
def test_a_workflow_that_cannot_be_used_is_a_problem_of_its_key(
    tmp_path: Path, overrides: tuple[str, ...], message: str
):
    path = write_run(tmp_path)
    write_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "d.jsonl", "two")
    out = run(path, *overrides, summarize_dataset=summarize_dataset)
    assert out.exit_code == 2
    assert message in out.stderr


def test_an_answer_that_nothing_can_be_scored_against_is_a_bad_row(tmp_path: Path):
    path = write_run(tmp_path)
    write_tokenizer(tmp_path / "model")
    rows = [{"prompt": "two", "answer": answer} for answer in ("3/4", "three", None)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = run(path, "reward=number_match", summarize_dataset=summarize_dataset)
    assert out.exit_code == 2
    assert "2 rows cannot be used" in out.stderr
    assert "d.jsonl:2:1: reward number_match: the answer 'three' is not a number" in out.stderr
    assert "d.jsonl:3:1: reward exact_match: the answer is null" in (
        run(path, summarize_dataset=summarize_dataset).stderr
    )
    # It may score itself.
    own = run(
        path,
        "workflow=user_workflows:workflow",
        "workflow_args={times: 2}",
        summarize_dataset=summarize_dataset,
    )
    assert "3 rows, 0 skipped" in own.stdout

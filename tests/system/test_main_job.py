"""The whole job with real parts, as a user starts it: vLLM, torchrun, Megatron-Core, weights."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from libra.storage.safetensors import model_tensors
from main_jobs import Job, read_lines, servers, tagged_processes

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

NUM_STEPS = 60
"""Enough for the reward to pass half way; the whole curve is in docs/benchmarks.md."""


def newest_checkpoint(run_dir: Path) -> int:
    return max((int(p.name[5:]) for p in (run_dir / "checkpoints").glob("step_??????")), default=0)


def log_bytes(run_dir: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (run_dir / "logs").glob("vllm-?.log")}


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.mp-"))}


def visits(run_dir: Path) -> Counter:
    """How often each (group id without its attempt) was trained on."""
    seen: Counter = Counter()
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        groups = {line["trajectory_id"].rsplit("/s", 1)[0] for line in read_lines(path)}
        seen.update(group.rsplit("/a", 1)[0] for group in groups)
    return seen


def explain(run_dir: Path) -> dict:
    """`POST /v1/explain` over the run's socket."""
    command = [
        *("curl", "--silent", "--fail-with-body", "--unix-socket", "control.sock"),
        *("--data", '{"num_prompt_tokens": 40, "max_new_tokens": 8}'),
        "http://localhost/v1/explain",
    ]
    said = subprocess.run(command, cwd=run_dir, capture_output=True, check=True, text=True)
    return json.loads(said.stdout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quickstart):
    """One whole run, and what its processes looked like while it ran."""
    run_dir = tmp_path_factory.mktemp("main") / "run"
    evaluation = ("-o", f"eval_data={quickstart / 'eval.jsonl'}", "-o", "eval_samples=2")
    options = ("-o", f"total_steps={NUM_STEPS}", "-o", "save_interval=20", "-o", "eval_interval=40")
    job = Job(run_dir, quickstart, *options, *evaluation, "--log-level", "debug")
    try:
        job.until_step(1, 600)
        commands = [" ".join(p.cmdline()) for p in tagged_processes(run_dir)]
        explained = explain(run_dir)
        code = job.wait(900)
    finally:
        if job.process.poll() is None:
            job.kill()
    return job, code, commands, explained


def test_the_run_ends_with_0_and_leaves_nothing_behind(finished):
    job, code, *_ = finished
    assert code == 0, job.said()
    assert tagged_processes(job.run_dir) == []
    assert not (job.run_dir / "control.sock").exists()
    assert [p for p in job.run_dir.rglob("*") if p.is_socket()] == []


def test_servers_and_ranks_are_the_real_ones(finished):
    _, _, commands, _ = finished
    assert sum("libra.serving.launch" in command for command in commands) >= 2
    assert any("torch.distributed.run" in command for command in commands)
    assert sum(" -m libra.trainer " in command for command in commands) >= 2


def test_a_running_job_explains_where_a_request_would_go(finished):
    *_, explained = finished
    assert explained["ok"], explained
    details = explained["details"]
    assert explained["message"] == details["reason"]
    assert {instance["instance_id"] for instance in details["instances"]} == {"vllm-0", "vllm-1"}
    assert details["choice"] in {"vllm-0", "vllm-1", None}


def test_at_debug_level_the_log_says_why_each_request_went_where_it_went(finished):
    job, *_ = finished
    said = read_lines(job.run_dir / "logs/control.jsonl")
    decisions = [line for line in said if line["event"] == "request_explained"]
    placed = {line["choice"] for line in decisions}
    assert {"vllm-0", "vllm-1"} <= placed
    assert all(len(line["instances"]) == 2 for line in decisions[-100:])


def test_the_reward_rises_past_half_way(finished):
    job, *_ = finished
    rewards = [line["reward_mean"] for line in job.steps()]
    assert len(rewards) == NUM_STEPS
    assert rewards[0] < 0.3
    assert sum(rewards[-5:]) / 5 > 0.5, rewards


@pytest.mark.case("T-B38")
def test_engine_and_trainer_compute_the_same_policy(finished):
    job, *_ = finished
    first = job.steps()[0]
    assert first["staleness_max"] == 0
    assert first["kl_mismatch"] < 1e-3
    reloads = read_lines(job.run_dir / "reloads.jsonl")
    assert [r["policy_version"] for r in reloads if not r["is_catch_up"]] == [*range(NUM_STEPS + 1)]
    for reload in reloads:
        assert reload["outcome"] == "committed"
        assert len(reload["accepted"]) == 2
        assert 0 < reload["probe_difference"] < 1e-3


def test_every_step_has_its_numbers_and_stays_within_the_staleness_bound(finished):
    job, *_ = finished
    wanted = {
        *("step", "policy_version", "reward_mean", "reward_std", "frac_zero_std"),
        *("num_trajectories", "response_tokens_mean", "staleness_mean", "staleness_max", "loss"),
        *("grad_norm", "entropy", "clip_fraction", "kl_mismatch", "tokens_per_s"),
        *("rollout_wait_s", "train_s", "recompute_s", "export_s", "reload_s"),
    }
    for number, line in enumerate(job.steps(), start=1):
        assert wanted <= line.keys()
        assert line["step"] == line["policy_version"] == number
        assert line["staleness_max"] <= 1
        assert line["num_trajectories"] == 64


def test_the_run_directory_is_complete(finished):
    job, *_ = finished
    names = (
        *("config.given.yaml", "config.resolved.yaml", "plan.json", "state.json"),
        *("journal.jsonl", "metrics.jsonl", "reloads.jsonl", "logs/control.jsonl"),
        *("logs/trainer.log", "logs/vllm-0.log", "logs/vllm-1.log"),
        f"weights/v{NUM_STEPS:06d}/manifest.json",
        f"weights/v{NUM_STEPS:06d}/model.safetensors",
        f"checkpoints/step_{NUM_STEPS:06d}/checkpoint.json",
        f"trajectories/step_{NUM_STEPS:06d}.jsonl",
        *("phase_trace/phase_trace_rank0.jsonl", "phase_trace/phase_trace_rank1.jsonl"),
    )
    assert [name for name in names if not (job.run_dir / name).exists()] == []
    assert len(list((job.run_dir / "weights").iterdir())) <= 3
    assert sum(not it.name.startswith(".") for it in (job.run_dir / "checkpoints").iterdir()) == 2


def test_the_first_the_last_and_each_version_that_is_due_are_evaluated(finished):
    job, *_ = finished
    evaluations = read_lines(job.run_dir / "evaluations.jsonl")
    assert [line["policy_version"] for line in evaluations] == [0, 40, NUM_STEPS]
    for line in evaluations:
        version, summary = line["policy_version"], line["summary"]
        assert summary["num_trajectories"] == 2 * summary["num_rows"] > 0
        assert summary["num_failed"] == 0
        written = read_lines(job.run_dir / f"trajectories/eval_v{version:06d}.jsonl")
        assert len({t["trajectory_id"] for t in written}) == summary["num_trajectories"]
        assert {t["oldest_version"] for t in written} == {version}
    first, _, last = (line["summary"]["reward_mean"] for line in evaluations)
    assert last > first


def test_the_logs_verb_shows_what_the_engines_wrote(finished):
    job, *_ = finished
    command = [sys.executable, "-m", "libra_supervisor.cli", "logs", "--role", "rollout"]
    said = subprocess.run(
        [*command, "--run-dir", str(job.run_dir)], check=True, capture_output=True, text=True
    )
    assert " vllm-0 out | " in said.stdout
    assert " vllm-1 out | " in said.stdout
    assert " trainer out | " not in said.stdout


def test_no_prompt_visit_is_trained_on_twice(finished):
    job, *_ = finished
    assert set(visits(job.run_dir).values()) == {1}


def is_rank(process) -> bool:
    try:
        return "libra.trainer" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def resumed_on_the_same_servers(job, quickstart, options):
    """SIGKILL the supervisor alone and start another: (its job, step restored, step killed at)."""
    run_dir = job.run_dir
    job.until_step(2, 600)
    serving = servers(run_dir)
    assert len(set(serving.values())) == 2
    time.sleep(random.Random().uniform(0.0, 1.0))
    job.process.kill()
    job.process.wait()
    # A rank that is writing a checkpoint may come to its end before it leaves.
    left = [it for it in tagged_processes(run_dir) if it.pid not in serving]
    ranks = [it for it in left if is_rank(it)]
    assert psutil.wait_procs(ranks, timeout=30)[1] == []
    saved, killed_at = newest_checkpoint(run_dir), job.steps()[-1]["step"]
    log_sizes = log_bytes(run_dir)
    resumed = Job(run_dir, quickstart, *options, "--resume")
    try:
        resumed.until_step(killed_at + 2, 600)
        assert servers(run_dir) == serving
        assert all(size > log_sizes[name] for name, size in log_bytes(run_dir).items())
    except BaseException:
        resumed.kill()
        raise
    return resumed, saved, killed_at


@pytest.mark.case("T-B50", "T-B78", "T-B52", "R-B74")
def test_after_sigkill_a_resumed_run_goes_on_where_it_was(tmp_path, quickstart):
    """First of the supervisor alone: the same servers go on. Then of nearly everything."""
    run_dir = tmp_path / "run"
    # No machine is so fast that it comes to the end before it is killed.
    options = ("-o", "total_steps=100000", "-o", "save_interval=2")
    job = Job(run_dir, quickstart, *options)
    try:
        job, first_saved, first_killed_at = resumed_on_the_same_servers(job, quickstart, options)
        time.sleep(random.Random().uniform(0.0, 3.0))
        # vLLM's inner processes live on when only their API server is killed.
        orphans = job.kill(but="VLLM::")
        assert len(orphans) >= 2
        saved, killed_at = newest_checkpoint(run_dir), job.steps()[-1]["step"]
        last = killed_at + 4
        end = (*options, "-o", f"total_steps={last}", "--resume")
        job = resumed = Job(run_dir, quickstart, *end)
        assert resumed.wait(900) == 0, resumed.said()
    finally:
        if job.process.poll() is None:
            job.kill()
    steps = [line["step"] for line in resumed.steps()]
    # Steps after the checkpoint are trained again, and none is left out.
    assert steps == [
        *range(1, first_killed_at + 1),
        *range(first_saved + 1, killed_at + 1),
        *range(saved + 1, last + 1),
    ]
    # A repeated step is told from the first one by its attempt.
    assert len({(line["step"], line["attempt"]) for line in resumed.steps()}) == len(steps)
    rates = {line["learning_rate"] for line in resumed.steps()}
    assert len(rates) == 1
    assert set(visits(run_dir).values()) == {1}
    assert tagged_processes(run_dir) == []
    assert psutil.wait_procs(orphans, timeout=10)[1] == []


@pytest.mark.case("T-B80")
@pytest.mark.case("R-B54")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 0)])
def test_two_signals_during_start_up_leave_nothing_running(tmp_path, quickstart, number, code):
    job = Job(tmp_path / "run", quickstart)
    try:
        deadline = time.monotonic() + 120
        while len(tagged_processes(job.run_dir)) < 3:
            assert time.monotonic() < deadline, job.said()
            time.sleep(0.2)
        job.process.send_signal(number)
        time.sleep(0.5)
        job.process.send_signal(number)
        assert job.wait(60) == code, job.said()
    finally:
        if job.process.poll() is None:
            job.kill()
    assert tagged_processes(job.run_dir) == []


@pytest.mark.long
def test_the_fsdp_backend_does_the_whole_job_and_resumes_it(tmp_path, quickstart):
    run_dir = tmp_path / "run"
    job = Job(run_dir, quickstart, "-o", "train_backend=fsdp", "-o", "total_steps=3")
    try:
        assert job.wait(900) == 0, job.said()
        job = Job(
            run_dir, quickstart, "-o", "train_backend=fsdp", "-o", "total_steps=4", "--resume"
        )
        assert job.wait(900) == 0, job.said()
    finally:
        if job.process.poll() is None:
            job.kill()
    steps = job.steps()
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert steps[0]["staleness_max"] == 0
    assert steps[0]["kl_mismatch"] < 1e-3
    reloads = read_lines(run_dir / "reloads.jsonl")
    assert [r["policy_version"] for r in reloads if not r["is_catch_up"]] == [0, 1, 2, 3, 3, 4]
    assert all(r["outcome"] == "committed" and len(r["accepted"]) == 2 for r in reloads)
    assert all(r["probe_difference"] < 1e-3 for r in reloads)
    names = [
        {tensor.name for tensor in model_tensors(directory)}
        for directory in (quickstart / "model", run_dir / "weights/v000004")
    ]
    assert names[0] == names[1]
    assert tagged_processes(run_dir) == []


@pytest.mark.long
def test_a_checkpoint_is_exported_evaluated_and_forked(tmp_path, quickstart):
    first = Job(tmp_path / "first", quickstart, "-o", "total_steps=2")
    evaluated = forked = first
    try:
        assert first.wait(900) == 0, first.said()
        checkpoint = first.run_dir / "checkpoints/step_000002"
        export = [sys.executable, "-m", "libra_supervisor.cli", "export"]
        subprocess.run([*export, checkpoint, tmp_path / "out"], check=True, cwd=tmp_path)
        evaluation = ("-o", f"eval_data={quickstart / 'eval.jsonl'}", "-o", "eval_samples=2")
        evaluated = Job(tmp_path / "eval", quickstart, *evaluation, verb=("eval", checkpoint))
        assert evaluated.wait(900) == 0, evaluated.said()
        # Other data order and groups than the checkpoint's run.
        options = ("-o", "total_steps=3", "-o", "seed=9", "-o", "n_samples=4")
        options += ("-o", "learning_rate=1e-3", "-o", "weight_decay=0.1")
        forked = Job(tmp_path / "fork", quickstart, *options, verb=("fork", checkpoint))
        assert forked.wait(900) == 0, forked.said()
    finally:
        for job in (first, evaluated, forked):
            if job.process.poll() is None:
                job.kill()
    published = first.run_dir / "weights/v000002"
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (published / name).read_bytes()
    (line,) = read_lines(evaluated.run_dir / "evaluations.jsonl")
    assert line["policy_version"] == 2
    assert line["summary"]["num_trajectories"] == 2 * line["summary"]["num_rows"]
    assert "v2: avg@2 " in evaluated.said()
    assert evaluated.steps() == []
    assert [step["step"] for step in forked.steps()] == [3]
    # A checkpoint's version is published first: engine and trainer agree on it.
    assert [r["policy_version"] for r in read_lines(forked.run_dir / "reloads.jsonl")] == [2, 3]
    assert forked.steps()[0]["staleness_max"] == 0
    assert forked.steps()[0]["kl_mismatch"] < 1e-3
    assert tagged_processes(forked.run_dir) == []


@pytest.mark.long
def test_with_reloads_by_restart_every_version_is_served_by_a_new_process(tmp_path, quickstart):
    job = Job(
        tmp_path / "run",
        quickstart,
        *("-o", "total_steps=2", "-o", "save_interval=0", "-o", "rollout_gpus=1"),
        *("-o", "heterogeneous_rollout.instances=[{tp: 1, count: 1}]"),
        *("-o", "rollout_weight_reload_method=restart"),
    )
    try:
        assert job.wait(1200) == 0, job.said()
    finally:
        if job.process.poll() is None:
            job.kill()
    reloads = read_lines(job.run_dir / "reloads.jsonl")
    assert [r["policy_version"] for r in reloads] == [0, 1, 2]
    assert len({r["acks"][0]["incarnation"] for r in reloads}) == 3
    for reload in reloads:
        (ack,) = reload["acks"]
        assert ack["method"] == "restart"
        assert ack["process_stop_s"] > 0
        assert ack["model_load_s"] > 0
    assert tagged_processes(job.run_dir) == []


@pytest.mark.long
def test_a_job_without_a_disk_for_weights_survives_a_server_and_is_resumed(tmp_path, quickstart):
    """Transfers through the command line: a server dies, the ranks do not notice; then --resume."""
    run_dir = tmp_path / "run"
    options = (
        *("-o", "rollout_weight_sync_mode=nccl", "-o", "save_interval=4"),
        *("-o", "global_resource_planner.min_rollout_gpus=1"),
    )
    job = Job(run_dir, quickstart, *options, "-o", "total_steps=100000")
    job.until_step(3, 600)
    victim = next(pid for pid, name in servers(run_dir).items() if name == "vllm-0")
    psutil.Process(victim).kill()
    until_both_serve_again(job, timeout_s=900)
    job.process.terminate()
    assert job.wait(300) == 0, job.said()
    assert {line["attempt"] for line in job.steps()} == {1}, "training was begun anew"
    assert list((run_dir / "weights").iterdir()) == []
    reloads = read_lines(run_dir / "reloads.jsonl")
    proved = [ack for line in reloads for ack in line["acks"] if ack["error"] is None]
    assert {ack["verified"][1] for ack in proved} == {"checksum"}
    committed = [r for r in reloads if r["outcome"] == "committed" and not r["is_catch_up"]]
    versions = [r["policy_version"] for r in committed]
    assert versions == list(range(len(versions)))
    assert max(r["probe_difference"] for r in committed) < 1e-4
    last = job.steps()[-1]["step"]
    again = Job(run_dir, quickstart, *options, "-o", f"total_steps={last + 2}", "--resume")
    assert again.wait(900) == 0, again.said()
    # The engines began with the base model: the restored version was sent to them.
    of_second_life = read_lines(run_dir / "reloads.jsonl")[len(reloads) :]
    assert [r["policy_version"] for r in of_second_life if not r["is_catch_up"]] == [
        *range(last, last + 3)
    ]
    assert again.steps()[-1]["step"] == last + 2


def until_both_serve_again(job: Job, *, timeout_s: float) -> None:
    """Both have received one version together after a batch that had only one of them."""
    deadline = time.monotonic() + timeout_s
    while True:
        accepted = [len(r["accepted"]) for r in read_lines(job.run_dir / "reloads.jsonl")]
        if 1 in accepted and 2 in accepted[accepted.index(1) :]:
            return
        assert job.process.poll() is None, job.said()
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.5)

"""Whole trainer processes under torchrun, with a stand-in at the supervisor's end of the links."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from libra import clock
from libra.errors import SiteError
from libra.ids import Incarnation, InstanceId, PolicyVersion, RunId
from libra.storage.checkpoints import list_complete_checkpoints, read_rollout_state
from libra.storage.manifests import read_manifest, verify_weights
from libra.wire.instance import ReloadAck, ReloadRequest
from libra.wire.rank import (
    AcksJudged,
    CheckpointSaved,
    ExportWeights,
    JudgeAcks,
    ModelReady,
    RankFailed,
    SaveBegun,
    SaveCheckpoint,
    Shutdown,
    StepTrained,
    WeightsExported,
)
from libra_supervisor.app.exporting import export_checkpoint
from tiny_models import make_tiny_model
from trainer_gang import FakeSupervisor, trainer_environment
from trainer_ranks import make_samples, run_config, train_step

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

VOCAB_SIZE = 250
PROBE = (5, 17, 3, 249, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "qwen2", "qwen2_tied")


def train(supervisor: FakeSupervisor, step: int, count: int = 16) -> StepTrained:
    samples = make_samples(step, count, VOCAB_SIZE)
    halves = [samples[: count // 2], samples[count // 2 :]]
    for rank, link in supervisor.links.items():
        dp_rank = supervisor.hellos[rank].dp_rank
        link.send(train_step(step, halves, dp_rank=dp_rank, dp_size=2))
    answers = {rank: link.expect(StepTrained) for rank, link in supervisor.links.items()}
    assert {answer.step for answer in answers.values()} == {step}
    assert [rank for rank, answer in answers.items() if answer.metrics is not None] == [0]
    return answers[0]


def wait_until_ready(supervisor: FakeSupervisor) -> list[ModelReady]:
    supervisor.accept_all()
    return [supervisor.links[rank].expect(ModelReady) for rank in sorted(supervisor.links)]


@pytest.fixture(scope="module")
def first_life(model, tmp_path_factory):
    """A run from Hello to Shutdown; what it said and where it left its files."""
    run_dir = tmp_path_factory.mktemp("run")
    config = run_config(model, micro_batch_size=8, recompute_micro_batch_size=8)
    said = {"config": config, "run_dir": run_dir}
    with FakeSupervisor(config, run_dir, 2) as supervisor:
        said["ready"] = wait_until_ready(supervisor)
        said["hellos"] = supervisor.hellos
        said["trained"] = [train(supervisor, step) for step in (1, 2)]
        weights = run_dir / "v000002"
        export = ExportWeights(
            run_id=RunId("run-under-test"),
            policy_version=PolicyVersion(2),
            directory=str(weights),
            probe_token_ids=PROBE,
        )
        supervisor.send(export)
        said["exported"] = supervisor.links[0].expect(WeightsExported)
        supervisor.links[0].send(judged_batch(said["exported"], weights))
        said["judged"] = supervisor.links[0].expect(AcksJudged)
        save = SaveCheckpoint(
            step=2,
            directory=str(run_dir / "checkpoints" / "step_000002"),
            rollout_state=b"cursor",
        )
        supervisor.send(save)
        said["begun"] = [supervisor.links[rank].expect(SaveBegun) for rank in (0, 1)]
        said["saved"] = supervisor.links[0].expect(CheckpointSaved)
        said["next"] = train(supervisor, 3)
        # The rank leaves when this one is complete, though nobody waits for it.
        last = msgspec.structs.replace(
            save, step=3, directory=str(run_dir / "checkpoints" / "step_000003")
        )
        supervisor.send(last)
        supervisor.send(Shutdown(reason="the test is over"))
        said["exit_code"] = supervisor.process.wait(timeout=60)
        said["heartbeats"] = list(supervisor.links[1].heartbeats)
    return said


def judged_batch(exported: WeightsExported, weights: Path) -> JudgeAcks:
    request = ReloadRequest(
        run_id=RunId("run-under-test"),
        policy_version=PolicyVersion(2),
        nonce="n",
        weights_directory=str(weights),
        manifest_hash=exported.manifest_hash,
        pause_mode="keep",
        probe_token_ids=PROBE,
    )
    right = ReloadAck(
        instance_id=InstanceId("vllm-0"),
        incarnation=Incarnation("a"),
        run_id=request.run_id,
        nonce="n",
        policy_version=request.policy_version,
        method="inplace",
        strategy="parallel",
        lock_wait_s=0.0,
        process_stop_s=0.0,
        model_load_s=0.5,
        total_s=0.6,
        manifest_hash=exported.manifest_hash,
        verified=("manifest", "files", "load", "probe"),
        probe_logprobs=exported.probe_logprobs,
    )
    wrong = msgspec.structs.replace(
        right,
        instance_id=InstanceId("vllm-1"),
        probe_logprobs=tuple(value - 0.1 for value in exported.probe_logprobs),
    )
    return JudgeAcks(request=request, acks=(right, wrong))


def test_each_rank_says_who_it_is_before_anything_else(first_life):
    hellos = first_life["hellos"]
    assert sorted(hellos) == [0, 1]
    assert [hellos[rank].dp_rank for rank in (0, 1)] == [0, 1]
    assert {h.world_size for h in hellos.values()} == {2}
    assert {h.run_id for h in hellos.values()} == {"run-under-test"}
    assert all(h.start_ticks > 0 and h.pid > 1 for h in hellos.values())


def test_a_new_run_is_ready_at_step_0_and_trains(first_life):
    assert [ready.step for ready in first_life["ready"]] == [0, 0]
    metrics = [answer.metrics for answer in first_life["trained"]]
    assert all(m.num_optimizer_steps == 2 and m.grad_norm > 0 for m in metrics)
    assert metrics[0].peak_memory_bytes > 50_000_000
    assert first_life["exit_code"] == 0


def test_heartbeats_name_the_phase_and_the_step(first_life):
    phases = {(beat.step, beat.phase) for beat in first_life["heartbeats"]}
    assert {(0, "join"), (0, "build"), (0, "load"), (1, "train"), (3, "optimizer")} <= phases
    assert {(2, "export"), (2, "probe"), (2, "checkpoint")} <= phases


def test_exported_weights_are_complete_and_carry_the_tokenizer(first_life):
    directory = first_life["run_dir"] / "v000002"
    manifest, manifest_hash = read_manifest(directory)
    assert manifest_hash == first_life["exported"].manifest_hash
    verify_weights(directory, manifest)
    assert manifest.policy_version == 2
    assert manifest.tied_embeddings
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer_config.json"} <= names
    assert not list(first_life["run_dir"].glob("**/*.partial"))


PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM
tokens = torch.tensor([[int(t) for t in sys.argv[2:]]])
model, loading = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, output_loading_info=True)
assert not any(loading[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
logprobs = torch.log_softmax(model(tokens).logits, -1)[0, :-1]
print(*logprobs.gather(-1, tokens[0, 1:, None]).squeeze(-1).tolist())
"""


def test_transformers_loads_the_export_and_agrees_with_the_probe(first_life):
    directory = first_life["run_dir"] / "v000002"
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, directory, *map(str, PROBE)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    logprobs = [float(word) for word in output.split()]
    assert logprobs == pytest.approx(list(first_life["exported"].probe_logprobs), abs=1e-4)


def test_rank_0_judges_acks_by_its_own_probe(first_life):
    judged = first_life["judged"]
    assert judged.accepted == ("vllm-0",)
    assert list(judged.refused) == ["vllm-1"]
    assert judged.probe_difference == pytest.approx(0.1, abs=1e-6)


def test_the_checkpoint_is_complete_and_holds_the_rollout_state(first_life):
    assert [begun.rank for begun in first_life["begun"]] == [0, 1]
    last, found = list_complete_checkpoints(first_life["run_dir"] / "checkpoints", with_hashes=True)
    assert last.step == 3
    assert (found.step, found.manifest.num_optimizer_steps) == (2, 4)
    assert read_rollout_state(found.directory) == b"cursor"
    assert first_life["saved"].directory == str(found.directory)


def test_a_checkpoint_of_two_ranks_is_exported_by_one_process(first_life, tmp_path):
    checkpoint = Path(first_life["saved"].directory)
    out = tmp_path / "out"
    run_id = RunId("run-under-test")
    export_checkpoint(checkpoint, out, run_id=run_id, environ=trainer_environment())
    published = first_life["run_dir"] / "v000002"
    names = ("model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json")
    for name in names:
        assert (out / name).read_bytes() == (published / name).read_bytes(), name
    manifest, _ = read_manifest(out)
    assert (manifest.run_id, manifest.policy_version) == (run_id, 2)
    verify_weights(out, manifest)
    with pytest.raises(SiteError, match="exists already"):
        export_checkpoint(checkpoint, out, run_id=run_id, environ=trainer_environment())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids, *, within_s: float) -> float:
    began_at = clock.monotonic()
    while any(is_alive(pid) for pid in pids):
        assert clock.monotonic() - began_at < within_s, "ranks are still there"
        signal.sigtimedwait([], 0.05)
    return clock.monotonic() - began_at


def test_a_restored_gang_repeats_the_next_step_and_leaves_when_its_supervisor_dies(first_life):
    run_dir = first_life["run_dir"]
    checkpoint = run_dir / "checkpoints" / "step_000002"
    with FakeSupervisor(first_life["config"], run_dir, 2, restore=checkpoint) as supervisor:
        assert [ready.step for ready in wait_until_ready(supervisor)] == [2, 2]
        repeated = train(supervisor, 3).metrics
        before = first_life["next"].metrics
        for name in ("loss", "grad_norm", "entropy", "kl_mismatch", "learning_rate"):
            assert getattr(repeated, name) == getattr(before, name), name

        # A stored probe judges an engine although this gang never exported these weights.
        exported = first_life["exported"]
        supervisor.links[0].send(judged_batch(exported, run_dir / "v000002"))
        assert supervisor.links[0].expect(AcksJudged).accepted == ("vllm-0",)

        # In the middle of a long step, not while they wait for a command.
        samples = make_samples(4, 4000, VOCAB_SIZE)
        for rank, link in supervisor.links.items():
            link.send(train_step(4, [samples], dp_rank=rank, dp_size=2))
        pids = [hello.pid for hello in supervisor.hellos.values()]
        for link in supervisor.links.values():
            link.close()
        wait_until_gone(pids, within_s=20.0)
        assert supervisor.process.wait(timeout=60) != 0


def test_a_model_that_is_not_there_is_named_with_the_exit_code_of_bad_input(tmp_path):
    config = run_config(tmp_path / "absent")
    with FakeSupervisor(config, tmp_path / "run", 1) as supervisor:
        supervisor.accept_all()
        failed = supervisor.links[0].expect(RankFailed)
        assert failed.exit_code == 2
        assert str(tmp_path / "absent" / "config.json") in failed.message
        assert supervisor.process.wait(timeout=60) == 1


def test_a_rank_that_dies_takes_the_gang_with_it(model, tmp_path):
    with FakeSupervisor(run_config(model), tmp_path / "run", 2) as supervisor:
        wait_until_ready(supervisor)
        pids = {rank: hello.pid for rank, hello in supervisor.hellos.items()}
        os.kill(pids[1], signal.SIGKILL)
        wait_until_gone(pids.values(), within_s=45.0)
        assert supervisor.process.wait(timeout=60) == 1

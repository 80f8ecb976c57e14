"""A trainer rank that trains nothing: it publishes, judges and saves as the real one does.

FAKE_STEP_S is how long a step takes. ACKs are judged beside it, as by the real one.
"""

import json
import os
import socket
import sys
import time
from math import prod
from pathlib import Path
from queue import Queue
from threading import Lock, Thread

import msgspec

from fake_vllm import default_probe
from libra.storage.checkpoints import (
    CHECKPOINT_FORMAT,
    ROLLOUT_STATE_NAME,
    CheckpointManifest,
    TrainerLayout,
    write_checkpoint_manifest,
)
from libra.storage.digest import file_entry
from libra.trainer.lease_watch import watch_lease
from libra.trainer.rank_lines import mark_output
from libra.weights.judge import judge_acks
from libra.wire.framing import FrameDecoder, encode_frame
from libra.wire.rank import (
    AcksJudged,
    CheckpointSaved,
    ExportWeights,
    Heartbeat,
    Hello,
    JudgeAcks,
    ModelReady,
    RankCommand,
    SaveBegun,
    SaveCheckpoint,
    Shutdown,
    StepTrained,
    TrainMetrics,
    TrainStep,
    WeightsExported,
)
from weight_dirs import publish_weights

mark_output(int(os.environ["RANK"]))
if "LIBRA_LEASE" in os.environ:
    watch_lease(Path(os.environ["LIBRA_LEASE"]))
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["LIBRA_ATTEMPT"])
restored = Path(sys.argv[sys.argv.index("--restore") + 1]) if "--restore" in sys.argv else None
work, saying = Queue(), Lock()
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["LIBRA_CONTROL"])
METRICS = TrainMetrics(
    loss=0.0,
    grad_norm=1.0,
    entropy=1.0,
    clip_fraction=0.0,
    kl_mismatch=0.0,
    ratio_mean=1.0,
    learning_rate=1e-3,
    num_tokens=8,
    num_optimizer_steps=1,
    num_skipped_steps=0,
    recompute_s=0.1,
    train_s=0.2,
    peak_memory_bytes=0,
)


def say(event):
    with saying:
        connection.sendall(encode_frame(msgspec.msgpack.encode(event)))


def dp_rank():
    if "--config" not in sys.argv:
        return rank
    path = Path(sys.argv[sys.argv.index("--config") + 1])
    config = json.loads(path.read_text())["training"]
    return rank // prod(config[f"train_{size}_size"] for size in ("tp", "pp", "cp"))


def export(command: ExportWeights):
    directory, manifest_hash = publish_weights(
        Path(command.directory).parent, command.policy_version, run_id=command.run_id
    )
    probe = default_probe(command.probe_token_ids, command.policy_version)
    say(WeightsExported(command.policy_version, str(directory), manifest_hash, probe, 0.01))


def judge(command: JudgeAcks) -> AcksJudged:
    request = command.request
    return judge_acks(
        request,
        command.acks,
        trainer_probe_logprobs=default_probe(request.probe_token_ids, request.policy_version),
        probe_tolerance=1e-3,
    )


def save(command: SaveCheckpoint):
    say(SaveBegun(rank, command.step))
    if rank:
        return
    final = Path(command.directory)
    partial = final.with_name(f".{final.name}")
    partial.mkdir()
    (partial / ROLLOUT_STATE_NAME).write_bytes(command.rollout_state)
    manifest = CheckpointManifest(
        format=CHECKPOINT_FORMAT,
        step=command.step,
        num_optimizer_steps=command.step,
        num_skipped_in_a_row=0,
        architecture_hash="tiny",
        reference_hash=None,
        layout=TrainerLayout(
            world_size=world,
            tensor=1,
            pipeline=1,
            context=1,
            expert=1,
            has_distributed_optimizer=False,
        ),
        files=(file_entry(partial / ROLLOUT_STATE_NAME),),
    )
    write_checkpoint_manifest(partial, manifest)
    partial.rename(final)
    say(CheckpointSaved(command.step, str(final), 0.01))


def obey(command):
    match command:
        case TrainStep(step=step):
            say(Heartbeat(rank, step, "forward"))
            time.sleep(float(os.environ.get("FAKE_STEP_S", "0.1")))
            print(f"trained step {step}", flush=True)
            say(StepTrained(rank, step, METRICS if rank == 0 else None))
        case ExportWeights() if rank == 0:
            export(command)
        case SaveCheckpoint():
            save(command)
        case Shutdown():
            os._exit(0)


def obey_all():
    while True:
        obey(work.get())


start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
run_id = os.environ["LIBRA_RUN_ID"]
gang = os.environ["LIBRA_GANG"]
say(
    Hello(run_id, attempt, rank, world, rank, dp_rank(), 0, 0, 0, 0, os.getpid(), start_ticks, gang)
)
say(ModelReady(rank, 0 if restored is None else int(restored.name[5:]), 1000, 0.1))
Thread(target=obey_all, daemon=True).start()
decoder = FrameDecoder()
while data := connection.recv(1 << 20):
    for frame in decoder.feed(data):
        command = msgspec.msgpack.decode(frame, type=RankCommand)
        if isinstance(command, JudgeAcks):
            say(judge(command))
        else:
            work.put(command)
os._exit(1)

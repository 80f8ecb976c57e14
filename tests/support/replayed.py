"""A core alone that trains, step by step, on what another run was trained on."""

import json
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import load_file

from libra.config.load import load_resolved
from libra.config.run import RunConfig
from libra.data.cursor import PromptRef
from libra.ids import GroupId, PolicyVersion, PromptId, RunId, TrajectoryId
from libra.rollouts.batch import BatchShape
from libra.rollouts.group import AdmittedGroup, CompleteGroup
from libra.rollouts.trajectory import Trajectory
from libra.wire.instance import VersionSpan
from libra.wire.rank import ExportWeights, ModelReady, StepTrained, TrainStep, WeightsExported
from libra_supervisor.loop.execute import cut_batch
from trainer_gang import FakeSupervisor, Program


def fake_logprob(token_id: int) -> float:
    """What a FakeVllm says of a token that it sampled."""
    return -1.0 - (token_id % 10) / 10


def replayed_weights(run_dir: Path, folder: Path, *, num_steps: int) -> dict[str, torch.Tensor]:
    """The weights of one rank alone after the batches of the run's first steps."""
    config = load_resolved(run_dir / "config.resolved.json")
    with FakeSupervisor(config, folder, 1, program=Program(has_torchrun=False)) as core:
        core.accept_all()
        (link,) = core.links.values()
        link.expect(ModelReady)
        for step in range(1, num_steps + 1):
            groups = groups_of(run_dir / "trajectories" / f"step_{step:06d}.jsonl")
            (shard,) = cut_batch(groups, config.algorithm, shape_of(config))
            core.send(TrainStep(step, shard))
            assert link.expect(StepTrained, timeout_s=120.0).step == step
        exported = folder / "exported"
        core.send(
            ExportWeights(
                run_id=RunId("run-under-test"),
                policy_version=PolicyVersion(num_steps),
                directory=str(exported),
                probe_token_ids=(1, 2),
            )
        )
        link.expect(WeightsExported)
    return weights_in(exported)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def shape_of(config: RunConfig) -> BatchShape:
    training = config.training
    return BatchShape(dp_size=1, mini_batch_size=training.mini_batch_size or training.batch_size)


def groups_of(path: Path) -> tuple[CompleteGroup, ...]:
    """The batch of a step, from its lines."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return tuple(
        CompleteGroup(
            AdmittedGroup(PromptRef(PromptId(group_id), row=0, epoch=0), attempt=0, n_samples=0),
            tuple(trajectory_of(record) for record in of_group),
        )
        for group_id, of_group in groupby(records, key=group_id_of)
    )


def group_id_of(record: dict) -> str:
    return record["trajectory_id"].rpartition("/")[0]


def trajectory_of(record: dict) -> Trajectory:
    token_ids = record["token_ids"]
    mask = [0] * len(token_ids)
    for _, start, end in record["version_spans"]:
        mask[start:end] = [1] * (end - start)
    return Trajectory(
        trajectory_id=TrajectoryId(record["trajectory_id"]),
        prompt_id=PromptId(record["prompt_id"]),
        group_id=GroupId(group_id_of(record)),
        sample_index=record["sample_index"],
        token_ids=tuple(token_ids),
        loss_mask=tuple(mask),
        rollout_logprobs=tuple(
            fake_logprob(token) if is_sampled else 0.0
            for token, is_sampled in zip(token_ids, mask, strict=True)
        ),
        version_spans=tuple(
            VersionSpan(start=start, end=end, policy_version=PolicyVersion(version))
            for version, start, end in record["version_spans"]
        ),
        num_prompt_tokens=record["num_prompt_tokens"],
        finish_reason=record["finish_reason"],
        reward=record["reward"],
    )

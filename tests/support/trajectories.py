"""Trajectories and groups with values that tests do not care about filled in."""

from libra.ids import InstanceId, PolicyVersion, PromptId
from libra.rollouts.group import AdmittedGroup, CompleteGroup, PromptRef
from libra.rollouts.trajectory import Completion, Trajectory
from libra.wire.instance import VersionSpan


def prompt(row=0, epoch=0):
    return PromptRef(PromptId(f"row-{row}"), row, epoch)


def admitted(row=0, *, epoch=0, attempt=0, n_samples=2):
    return AdmittedGroup(prompt(row, epoch), attempt, n_samples)


def trajectory(group, index=0, *, version=0, reward=1.0, num_response=2, finish_reason="stop"):
    """Two prompt tokens, then `num_response` sampled by `version`."""
    return Trajectory(
        trajectory_id=group.trajectory_id(index),
        prompt_id=group.prompt.prompt_id,
        group_id=group.group_id,
        sample_index=index,
        token_ids=(1, 2, *range(10, 10 + num_response)),
        loss_mask=(0, 0) + (1,) * num_response,
        rollout_logprobs=(0.0, 0.0) + (-0.5,) * num_response,
        version_spans=(VersionSpan(PolicyVersion(version), 2, 2 + num_response),),
        num_prompt_tokens=2,
        finish_reason=finish_reason,
        reward=reward,
        instance_ids=(InstanceId("vllm-0"),),
    )


def complete(group, *, version=0, rewards=None):
    rewards = rewards or [float(i) for i in range(group.n_samples)]
    return CompleteGroup(
        group,
        tuple(trajectory(group, i, version=version, reward=r) for i, r in enumerate(rewards)),
    )


def completion(token_ids=(10, 11), *, version=0, finish_reason="stop", num_prompt_tokens=2):
    """An answer that one version sampled."""
    token_ids = tuple(token_ids)
    spans = (VersionSpan(PolicyVersion(version), 0, len(token_ids)),) if token_ids else ()
    return Completion(
        token_ids=token_ids,
        logprobs=(-0.5,) * len(token_ids),
        finish_reason=finish_reason,
        version_spans=spans,
        instance_id=InstanceId("vllm-0"),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=0,
    )

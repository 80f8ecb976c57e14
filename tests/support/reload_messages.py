"""Reload requests and ACKs for tests, right by default."""

import msgspec

from libra.weights.reload import Member
from libra.wire.instance import ReloadAck, ReloadRequest


def reload_request(**changes) -> ReloadRequest:
    request = ReloadRequest(
        run_id="run-1",
        policy_version=7,
        nonce="nonce-1",
        weights_directory="/weights/v000007",
        manifest_hash="hash-7",
        pause_mode="keep",
        probe_token_ids=(1, 2, 3),
    )
    return msgspec.structs.replace(request, **changes)


def reload_ack(request: ReloadRequest, instance: str, **changes) -> ReloadAck:
    ack = ReloadAck(
        instance_id=instance,
        incarnation=f"{instance}#1",
        run_id=request.run_id,
        nonce=request.nonce,
        policy_version=request.policy_version,
        method="inplace",
        strategy="parallel",
        lock_wait_s=0.0,
        process_stop_s=0.0,
        model_load_s=0.5,
        total_s=1.0,
        manifest_hash=request.manifest_hash,
        verified=("manifest", "files", "load", "probe"),
        probe_logprobs=tuple(-1.0 for _ in request.probe_token_ids[1:]),
    )
    return msgspec.structs.replace(ack, **changes)


def member(instance: str, *, node: int = 0, num_gpus: int = 1) -> Member:
    return Member(instance, f"{instance}#1", node, num_gpus)

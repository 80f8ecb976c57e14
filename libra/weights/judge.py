"""Whether an ACK proves that its server answers with the weights it was asked to load. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from libra.config.weights import ReloadMethod
from libra.errors import InvariantError
from libra.wire.instance import ReloadAck, ReloadRequest
from libra.wire.rank import AcksJudged

if TYPE_CHECKING:
    from libra.ids import InstanceId

READ_IN_FULL = ("manifest", "files", "load", "probe")
BY_RECEIPT = ("manifest", "receipt", "load", "probe")
"""What an ACK may say was verified, in this order; the second only where a receipt was sent."""

BY_TRANSFER = ("tensors", "checksum", "load", "probe")
"""The same where weights came through a group."""

STOP_FACTOR = 10.0
"""A difference above STOP_FACTOR times the tolerance ends the run; above the tolerance it warns."""

# Times are measured by separate clock reads, so their float sum may exceed the total by rounding.
TIME_SLACK_S = 1e-6

_PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}


def probe_tolerance_of(dtype: str) -> float:
    """Tolerated |trainer - engine| probe logprob (design decision 15).

    float16 keeps more mantissa than bfloat16 and gets bfloat16's tolerance.
    """
    if dtype == "float16":
        return _PROBE_TOLERANCE["bfloat16"]
    try:
        return _PROBE_TOLERANCE[dtype]
    except KeyError:
        raise InvariantError(f"no probe tolerance is known for dtype {dtype!r}") from None


def ack_problems(request: ReloadRequest, ack: ReloadAck) -> tuple[str, ...]:
    """Everything in which `ack` is not the proof that `request` asked for; empty when it is."""
    if ack.error is not None:
        return (f"the reload failed: {ack.error}",)
    return (
        *_identity_problems(request, ack),
        *_time_problems(ack),
        *_verification_problems(request, ack),
    )


def judge_acks(
    request: ReloadRequest,
    acks: Sequence[ReloadAck],
    *,
    trainer_probe_logprobs: Sequence[float],
    probe_tolerance: float,
    checksum: str | None = None,
) -> AcksJudged:
    """Judge a whole batch. An instance that answered twice is refused with both its ACKs.

    `checksum` is that of what was sent; None when the weights came from a disk.
    `probe_tolerance` is that of `probe_tolerance_of`; an instance is refused only above
    STOP_FACTOR times it. `probe_difference` covers the refused-for-that instances too, so that
    the caller sees how far off they are.
    """
    refused: dict[InstanceId, str] = {}
    accepted: list[ReloadAck] = []
    largest = 0.0
    num_acks_of = Counter(ack.instance_id for ack in acks)
    for ack in acks:
        if num_acks_of[ack.instance_id] > 1:
            refused[ack.instance_id] = "it answered more than once"
            continue
        problems = (*ack_problems(request, ack), *_checksum_problems(checksum, ack))
        if problems:
            refused[ack.instance_id] = "; ".join(problems)
            continue
        difference = probe_difference(trainer_probe_logprobs, ack.probe_logprobs)
        largest = max(largest, difference)
        if difference > STOP_FACTOR * probe_tolerance:
            refused[ack.instance_id] = (
                f"its probe differs from the trainer's by {difference:.3g}, more than "
                f"{STOP_FACTOR:g} times the tolerance {probe_tolerance:g}"
            )
            continue
        accepted.append(ack)
    slowest = max(accepted, key=lambda ack: ack.total_s, default=None)
    return AcksJudged(
        policy_version=request.policy_version,
        nonce=request.nonce,
        accepted=tuple(ack.instance_id for ack in accepted),
        refused=refused,
        slowest_instance=None if slowest is None else slowest.instance_id,
        slowest_total_s=0.0 if slowest is None else slowest.total_s,
        probe_difference=largest,
    )


def probe_difference(trainer: Sequence[float], engine: Sequence[float]) -> float:
    """Largest absolute difference; infinity when the lengths differ or a value is not finite."""
    if len(trainer) != len(engine):
        return math.inf
    differences = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
    if not all(map(math.isfinite, differences)):
        return math.inf
    return max(differences, default=0.0)


def _identity_problems(request: ReloadRequest, ack: ReloadAck) -> tuple[str, ...]:
    pairs = (
        ("run id", request.run_id, ack.run_id),
        ("nonce", request.nonce, ack.nonce),
        ("policy version", request.policy_version, ack.policy_version),
        ("manifest hash", request.manifest_hash, ack.manifest_hash),
    )
    return tuple(
        f"its {name} is {given!r} instead of {wanted!r}"
        for name, wanted, given in pairs
        if wanted != given
    )


def _time_problems(ack: ReloadAck) -> tuple[str, ...]:
    times = {
        "lock_wait_s": ack.lock_wait_s,
        "process_stop_s": ack.process_stop_s,
        "model_load_s": ack.model_load_s,
        "total_s": ack.total_s,
    }
    problems = [
        f"its {name} is {value}"
        for name, value in times.items()
        if not math.isfinite(value) or value < 0
    ]
    parts_s = ack.lock_wait_s + ack.process_stop_s + ack.model_load_s
    if not problems and parts_s > ack.total_s + TIME_SLACK_S:
        problems.append(f"its parts take {parts_s:.6g} s, more than its total {ack.total_s:.6g} s")
    if ack.method == "inplace" and ack.process_stop_s != 0:
        problems.append("it stopped a process although the method was inplace")
    return tuple(problems)


def _checksum_problems(sent: str | None, ack: ReloadAck) -> tuple[str, ...]:
    if sent is None or ack.checksum == sent:
        return ()
    return (f"it received weights with checksum {ack.checksum!r}, sent was {sent!r}",)


def _verification_problems(request: ReloadRequest, ack: ReloadAck) -> tuple[str, ...]:
    problems = []
    proofs = _proofs(request, ack.method)
    if ack.verified not in proofs:
        problems.append(f"it verified {list(ack.verified)} instead of {list(proofs[0])}")
    num_wanted = len(request.probe_token_ids) - 1
    if len(ack.probe_logprobs) != num_wanted:
        problems.append(f"it has {len(ack.probe_logprobs)} probe logprobs instead of {num_wanted}")
    if not all(map(math.isfinite, ack.probe_logprobs)):
        problems.append("a probe logprob is not finite")
    return tuple(problems)


def _proofs(request: ReloadRequest, method: ReloadMethod) -> tuple[tuple[str, ...], ...]:
    if request.transfer is not None:
        return (BY_TRANSFER,)
    # A process that starts reads everything itself: it may do so long after the check.
    if method == "restart" or request.receipt is None:
        return (READ_IN_FULL,)
    return (READ_IN_FULL, BY_RECEIPT)

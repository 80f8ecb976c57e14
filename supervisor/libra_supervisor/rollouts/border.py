"""What another node says of samples, checked before anything counts on it. Pure."""

from math import isfinite

import msgspec

from libra.errors import PeerError
from libra.rollouts.group import AdmittedGroup, identity_error
from libra.rollouts.trajectory import FailureKind, Trajectory, alignment_error
from libra.wire.decoding import decoded


def failure_kind(text: str) -> FailureKind:
    """Raises PeerError when it is none."""
    try:
        kind: FailureKind = msgspec.convert(text, FailureKind)
    except msgspec.ValidationError:
        raise PeerError(f"{text!r:.80} is no way to fail") from None
    return kind


def arrived_trajectory(data: bytearray, group: AdmittedGroup, sample: int) -> Trajectory:
    """What its node should have made sure of. Raises PeerError when it is not this sample's."""
    trajectory = decoded(data, Trajectory)
    wrong = identity_error(trajectory, group, sample) or alignment_error(trajectory)
    if wrong is None and (trajectory.reward is None or not isfinite(trajectory.reward)):
        wrong = f"reward {trajectory.reward}"
    if wrong is not None:
        raise PeerError(wrong)
    return trajectory

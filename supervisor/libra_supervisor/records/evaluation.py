"""One line of evaluations.jsonl. Pure."""

import msgspec

from libra.ids import PolicyVersion
from libra.rollouts.evaluation import EvaluationSummary


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation."""

    policy_version: PolicyVersion
    attempt: int
    """Gang attempt; a version evaluated again after a restart appears again with a higher one."""

    wall_time_ns: int
    """Of its end."""

    eval_s: float
    summary: EvaluationSummary

"""Whether a follower's machine has what the plan puts on it."""

import msgspec

from libra.config.load import load_resolved
from libra.ids import NodeRank
from libra.planner.matching import slots_of
from libra.planner.plan import Plan
from libra_supervisor.doctor.checks import check_node
from libra_supervisor.doctor.findings import Finding, devices_finding, refusals
from libra_supervisor.run_directory import RunDirectory


def what_is_lacking(
    directory: RunDirectory, node: NodeRank, host: str, devices: tuple[str, ...]
) -> str:
    """In words, for a node where nothing of the run is running; empty when nothing is.

    `directory` is the run's: its leader has written the plan there. Raises OSError and DecodeError
    when that cannot be read, ConfigError when its configuration cannot.
    """
    plan = msgspec.json.decode(directory.plan.read_bytes(), type=Plan)
    config = load_resolved(directory.resolved_config_json)
    is_cuda = config.control.device == "cuda"
    findings = check_node(config, plan, "cuda" if is_cuda else "cpu", node=node, host=host)
    if is_cuda:
        findings.append(_devices(plan, node, devices))
    return "; ".join(refusals(findings))


def _devices(plan: Plan, node: NodeRank, devices: tuple[str, ...]) -> Finding:
    num_slots = 1 + max((slot for where, slot in slots_of(plan) if where == node), default=-1)
    return devices_finding(num_slots=num_slots, devices=devices)

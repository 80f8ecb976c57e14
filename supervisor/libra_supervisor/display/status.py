"""What `libra-supervisor status` prints. Pure."""

from libra.wire.api import ChildStatus, EngineStatus, NodeStatus, StatusSnapshot
from libra_supervisor.display.progress import duration

HEADER = (
    "child",
    "state",
    "since",
    "pid",
    "restarts",
    "version",
    "in flight",
    "queued",
    "KV use",
    "seen",
    "last error",
)


def status_text(status: StatusSnapshot) -> str:
    """Several lines about the run, then a table of its children."""
    total = "" if status.total_steps is None else f"/{status.total_steps}"
    version = "-" if status.policy_version is None else f"v{status.policy_version}"
    reward = "-" if status.reward_mean is None else f"{status.reward_mean:.3f}"
    eta = "-" if status.eta_s is None else duration(status.eta_s)
    lines = [
        f"run {status.run_id} (pid {status.pid}), up {duration(status.uptime_s)}, ETA {eta}",
        f"{status.phase}: {status.waiting_for}",
        f"step {status.step}{total}, engines at {version}, reward {reward}",
        f"trajectories: {status.num_running} running, {status.num_buffered} ready",
        f"plan: {status.plan}",
        *([f"newest look at it: {status.last_decision}"] if status.last_decision else []),
        *([status.oldest_wait] if status.oldest_wait else []),
        *map(_node_line, status.nodes),
        "",
        *_table([HEADER, *(row for child in status.children for row in _rows(child))]),
    ]
    return "\n".join(lines) + "\n"


def _node_line(node: NodeStatus) -> str:
    since = "" if node.since_s is None else f" for {duration(node.since_s)}"
    why = f": {node.detail}" if node.detail else ""
    makes = f", {node.num_samples} trajectories in progress"
    return f"node {node.node} ({node.host}): {node.state}{since}{makes}{why}"


def _rows(child: ChildStatus) -> list[tuple[str, ...]]:
    """The child, and below it its engines when it has several."""
    return [_row(child), *map(_engine_row, child.engines)]


def _engine_row(engine: EngineStatus) -> tuple[str, ...]:
    known = {
        "child": f"  engine {engine.engine}",
        "state": "?" if engine.num_running is None else f"{engine.num_running} running",
        "queued": "?" if engine.num_queued is None else str(engine.num_queued),
        "KV use": "?" if engine.kv_use_fraction is None else f"{engine.kv_use_fraction:.0%}",
    }
    return tuple(known.get(column, "") for column in HEADER)


def _row(child: ChildStatus) -> tuple[str, ...]:
    return (
        child.child,
        child.state,
        duration(child.since_s),
        "-" if child.pid is None else str(child.pid),
        str(child.num_restarts),
        "-" if child.policy_version is None else f"v{child.policy_version}",
        str(child.num_in_flight),
        _known(child, "" if child.num_queued is None else str(child.num_queued)),
        _known(child, "" if child.kv_use_fraction is None else f"{child.kv_use_fraction:.0%}"),
        "-" if child.signals_age_s is None else f"{duration(child.signals_age_s)} ago",
        child.last_error,
    )


def _known(child: ChildStatus, text: str) -> str:
    """What an engine does not tell is unknown, which is not the same as nothing."""
    return text or ("?" if child.role == "rollout" else "-")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

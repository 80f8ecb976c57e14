"""The figures of the display, and how they read. Pure."""

import msgspec


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the run."""

    phase: str
    step: int
    total_steps: int | None
    policy_version: int | None
    reward_mean: float | None
    """Of the newest trained step."""

    tokens_per_s: float | None
    """Response tokens trained on per second of the newest step."""

    staleness_mean: float | None
    kl_mismatch: float | None
    num_serving: int
    num_instances: int
    num_running: int
    """Trajectories being generated or scored."""

    num_buffered: int
    """Scored trajectories of complete groups that wait to be trained on."""

    waiting_for: str
    """Who waits for whom, as a sentence."""

    elapsed_s: float
    eta_s: float | None


def plain_line(progress: Progress) -> str:
    """One line without control characters, for logs and pipes."""
    parts = [f"step {_of(progress.step, progress.total_steps)}"]
    if progress.reward_mean is not None:
        parts.append(f"reward {progress.reward_mean:.3f}")
    if progress.tokens_per_s is not None:
        parts.append(f"{progress.tokens_per_s:.0f} tok/s")
    if progress.staleness_mean is not None:
        parts.append(f"staleness {progress.staleness_mean:.2f}")
    if progress.kl_mismatch is not None:
        parts.append(f"kl_mismatch {progress.kl_mismatch:.1e}")
    parts.append(f"{progress.num_serving}/{progress.num_instances} engines")
    parts.append(progress.waiting_for)
    if progress.eta_s is not None:
        parts.append(f"ETA {duration(progress.eta_s)}")
    return " | ".join(parts)


def rows(progress: Progress) -> list[tuple[str, str]]:
    """Label and value of every line of the live table, in order."""
    return [
        ("phase", f"{progress.phase}: {progress.waiting_for}"),
        ("step", _of(progress.step, progress.total_steps)),
        ("reward", _number(progress.reward_mean, ".3f")),
        ("tokens/s", _number(progress.tokens_per_s, ".0f")),
        ("staleness", _number(progress.staleness_mean, ".2f")),
        ("kl mismatch", _number(progress.kl_mismatch, ".1e")),
        ("policy version", _number(progress.policy_version, "d")),
        ("engines serving", f"{progress.num_serving} of {progress.num_instances}"),
        ("trajectories", f"{progress.num_running} running, {progress.num_buffered} ready"),
        ("elapsed", duration(progress.elapsed_s)),
        ("ETA", "-" if progress.eta_s is None else duration(progress.eta_s)),
    ]


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`; fractions are dropped."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def eta_s(*, step: int, first_step: int, total_steps: int | None, trained_s: float) -> float | None:
    """Seconds left at the mean pace since this process's first step; None while unknown."""
    num_done = step - first_step
    if total_steps is None or num_done <= 0:
        return None
    return trained_s / num_done * (total_steps - step)


def _of(step: int, total: int | None) -> str:
    return str(step) if total is None else f"{step}/{total}"


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)

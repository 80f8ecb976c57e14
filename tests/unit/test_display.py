import io

import pytest

from libra.wire.api import ChildStatus, EngineStatus, NodeStatus, StatusSnapshot
from libra_supervisor.display.console import PlainDisplay, display_on
from libra_supervisor.display.progress import Progress, duration, eta_s, plain_line, rows
from libra_supervisor.display.status import status_text


def progress(**changes) -> Progress:
    base = {
        "phase": "collecting",
        "step": 3,
        "total_steps": 10,
        "policy_version": 3,
        "reward_mean": 0.25,
        "tokens_per_s": 512.4,
        "staleness_mean": 0.5,
        "kl_mismatch": 1e-7,
        "num_serving": 2,
        "num_instances": 2,
        "num_running": 64,
        "num_buffered": 8,
        "waiting_for": "the trainer waits for rollouts",
        "elapsed_s": 61.0,
        "eta_s": 3723.0,
    }
    return Progress(**{**base, **changes})


def test_a_plain_line_says_step_reward_speed_staleness_and_who_waits():
    assert plain_line(progress()) == (
        "step 3/10 | reward 0.250 | 512 tok/s | staleness 0.50 | kl_mismatch 1.0e-07 | "
        "2/2 engines | the trainer waits for rollouts | ETA 1:02:03"
    )


def test_what_is_not_known_yet_is_left_out_of_the_line_and_a_dash_in_the_table():
    unknown = progress(
        reward_mean=None,
        tokens_per_s=None,
        staleness_mean=None,
        kl_mismatch=None,
        eta_s=None,
        total_steps=None,
        policy_version=None,
    )
    assert plain_line(unknown) == "step 3 | 2/2 engines | the trainer waits for rollouts"
    shown = dict(rows(unknown))
    assert shown["reward"] == shown["ETA"] == shown["policy version"] == "-"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.9, "0:00"), (59, "0:59"), (61, "1:01"), (3600, "1:00:00")]
)
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text


def test_the_time_left_follows_the_mean_pace_of_this_process():
    assert eta_s(step=12, first_step=10, total_steps=20, trained_s=6.0) == 24.0
    assert eta_s(step=10, first_step=10, total_steps=20, trained_s=0.0) is None
    assert eta_s(step=12, first_step=10, total_steps=None, trained_s=6.0) is None


def test_outside_a_terminal_each_step_is_one_line_however_often_it_is_shown():
    written = []
    display = PlainDisplay(written.append)
    for phase in ("training", "exporting", "reloading", "collecting", "collecting"):
        display.show(progress(step=1, phase=phase))
    display.show(progress(step=2))
    assert [line.split(" | ")[0] for line in written] == ["step 1/10", "step 2/10"]


def test_during_start_up_every_change_of_phase_is_a_line():
    written = []
    display = PlainDisplay(written.append)
    for phase in ("starting", "starting", "exporting", "reloading"):
        display.show(progress(step=0, phase=phase))
    assert len(written) == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_table_is_painted_and_log_lines_stay_above_it():
    terminal = Terminal()
    with display_on(terminal) as display:
        display.show(progress())
        display.log("12:00:00 run_begins [not markup]")
    text = terminal.getvalue()
    assert "the trainer waits for rollouts" in text
    assert "run_begins [not markup]" in text


def test_a_stream_that_is_no_terminal_gets_plain_lines():
    stream = io.StringIO()
    with display_on(stream) as display:
        display.show(progress())
        display.log("a line")
    assert stream.getvalue().splitlines()[1] == "a line"
    assert "\x1b" not in stream.getvalue()


def test_status_lists_every_child_in_aligned_columns():
    def child(name, **changes):
        base = {
            "child": name,
            "role": "rollout",
            "state": "serving",
            "since_s": 5.0,
            "pid": 41,
            "num_restarts": 0,
            "policy_version": 3,
            "num_in_flight": 7,
            "num_queued": None,
            "kv_use_fraction": None,
            "signals_age_s": None,
            "last_error": "",
        }
        return ChildStatus(**{**base, **changes})

    engines = (
        EngineStatus(engine="0", num_running=3, num_queued=0, kv_use_fraction=0.25),
        EngineStatus(engine="1", num_running=None, num_queued=500, kv_use_fraction=None),
    )
    text = status_text(
        StatusSnapshot(
            run_id="r-1",
            run_directory="/runs/r",
            pid=4,
            phase="collecting",
            step=3,
            total_steps=10,
            policy_version=3,
            waiting_for="the trainer waits for rollouts",
            reward_mean=0.5,
            num_running=4,
            num_buffered=0,
            uptime_s=62.0,
            eta_s=None,
            plan="train 2 GPUs",
            last_decision="plan kept after step 3: 12 s are not enough",
            children=(
                child("vllm-0", num_queued=12, kv_use_fraction=0.5, signals_age_s=3.0),
                child("vllm-1", pid=None, last_error="killed by SIGKILL", engines=engines),
                child("trainer", role="trainer"),
            ),
            oldest_wait="group g has been silent for 3 s",
            nodes=(
                NodeStatus(node=0, host="a", state="leads", since_s=None, detail="", num_samples=8),
                NodeStatus(node=1, host="b", state="member", since_s=61.0, detail="no data"),
            ),
        )
    )
    lines = text.splitlines()
    assert lines[0] == "run r-1 (pid 4), up 1:02, ETA -"
    assert "group g has been silent for 3 s" in lines
    assert "node 0 (a): leads, 8 trajectories in progress" in lines
    assert "node 1 (b): member for 1:01, 0 trajectories in progress: no data" in lines
    assert "newest look at it: plan kept after step 3: 12 s are not enough" in lines
    header, first, second, *each, trainer = lines[-6:]
    assert header.index("pid") == first.index("41") == second.index("-", 8)
    assert second.endswith("killed by SIGKILL")
    # What an engine does not tell is unknown, not 0; a trainer has none of it.
    shown = [
        line[header.index("queued") : header.index("last error")]
        for line in (first, second, trainer)
    ]
    assert [cells.split() for cells in shown] == [
        ["12", "50%", "0:03", "ago"],
        ["?", "?", "-"],
        ["-", "-", "-"],
    ]
    assert trainer.startswith("trainer")
    # The engines of a data-parallel server follow it, in its columns.
    assert [line.split() for line in each] == [
        ["engine", "0", "3", "running", "0", "25%"],
        ["engine", "1", "?", "500", "?"],
    ]
    assert each[1].index("500") == header.index("queued")

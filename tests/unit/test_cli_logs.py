"""The `logs` verb over logs as children leave them."""

from datetime import datetime

import pytest

from libra_supervisor.cli.logs import NS_PER_S, since_ns
from libra_supervisor.cli.main import main

NOW_NS = 1_000_000 * NS_PER_S


@pytest.fixture
def run_dir(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "vllm-0.log").write_text("engine speaks\n")
    (logs / "trainer.log").write_text("[rank 1] trains\n[rank 0] trains\nsays torchrun\n")
    return tmp_path


def said(capsys, run_dir, *arguments):
    code = main(["logs", "--run-dir", str(run_dir), *arguments])
    out, err = capsys.readouterr()
    return code, [line.partition(" | ")[2] for line in out.splitlines()], err


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_since_counts_back_from_now(text, seconds):
    assert since_ns(text, now_ns=NOW_NS) == NOW_NS - seconds * NS_PER_S


def test_since_takes_a_local_time():
    at = datetime(2030, 1, 31, 12, 0, 0)  # noqa: DTZ001 - local, as a user types it
    assert since_ns("2030-01-31T12:00:00", now_ns=NOW_NS) == int(at.timestamp()) * NS_PER_S


def test_lines_are_chosen_by_role_child_and_rank(capsys, run_dir):
    trainer = ["[rank 1] trains", "[rank 0] trains", "says torchrun"]
    assert said(capsys, run_dir, "--role", "trainer")[:2] == (0, trainer)
    assert said(capsys, run_dir, "--role", "rollout")[:2] == (0, ["engine speaks"])
    assert said(capsys, run_dir, "--child", "vllm-0")[:2] == (0, ["engine speaks"])
    assert said(capsys, run_dir, "--rank", "1")[:2] == (0, ["[rank 1] trains"])
    assert sorted(said(capsys, run_dir)[1]) == sorted([*trainer, "engine speaks"])


def test_ranks_of_every_node_are_the_trainer_s_and_nothing_else_is(capsys, run_dir):
    logs = run_dir / "logs"
    for name in ("trainer-1", "trainer-12", "trainer-x", "reward-0"):
        (logs / f"{name}.log").write_text(f"{name} speaks\n")
    core = said(capsys, run_dir, "--role", "trainer", "--rank", "1")[1]
    assert core == ["[rank 1] trains"]
    core = said(capsys, run_dir, "--role", "trainer")[1]
    assert core[-2:] == ["trainer-1 speaks", "trainer-12 speaks"]
    rest = said(capsys, run_dir, "--role", "rollout")[1]
    assert rest == ["reward-0 speaks", "trainer-x speaks", "engine speaks"]


def test_a_role_that_has_logged_nothing_is_not_every_role(capsys, run_dir):
    (run_dir / "logs" / "trainer.log").unlink()
    assert said(capsys, run_dir, "--role", "trainer")[:2] == (0, [])


def test_what_is_not_there_is_named_with_what_is(capsys, run_dir, tmp_path):
    code, _, err = said(capsys, run_dir, "--child", "vllm-7")
    assert (code, "vllm-7; there are trainer, vllm-0" in err) == (2, True)
    code, _, err = said(capsys, run_dir, "--since", "yesterday")
    assert (code, "--since yesterday" in err) == (2, True)
    code, _, err = said(capsys, tmp_path / "nothing")
    assert (code, "has no logs" in err) == (5, True)

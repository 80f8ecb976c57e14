"""Which run a verb talks to when none is named."""

import os

import msgspec
import pytest

from libra.config.rollout import TpBucket
from libra.errors import PeerError, SiteError
from libra.wire.api import PlanOrder
from libra_supervisor.cli.arguments import parser
from libra_supervisor.cli.remote import _call, _newest, _order_in, _reply_in, speak
from libra_supervisor.process.peer import listen
from libra_supervisor.run_directory import Holder, RunDirectory


def socket_of(run, *, at):
    run.mkdir(parents=True)
    listener = listen(run / "control.sock")
    os.utime(run / "control.sock", (at, at))
    return listener


def test_the_newest_run_that_listens_is_meant_and_not_one_that_was_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket_of(tmp_path / "runs" / "old", at=1), socket_of(tmp_path / "runs" / "new", at=2):
        socket_of(tmp_path / "runs" / "killed", at=3).close()
        assert _newest().name == "new"


def test_where_nobody_listens_that_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    socket_of(tmp_path / "runs" / "killed", at=3).close()
    with pytest.raises(SiteError, match="no running control plane"):
        _newest()


@pytest.mark.parametrize(("body", "said"), [(b"", "nothing"), (b"[502] no", "502. no")])
def test_an_answer_that_is_none_is_the_control_planes_fault_in_one_line(tmp_path, body, said):
    with pytest.raises(PeerError, match=f"did not answer as it should: .?{said}"):
        _reply_in(body, RunDirectory(tmp_path))


@pytest.mark.parametrize("verb", [("status",), ("stop",), ("drain", "vllm-0")])
@pytest.mark.parametrize("has_socket", [False, True])
def test_where_the_leader_is_another_machine_its_name_is_said(tmp_path, verb, has_socket):
    def said(host):
        (run / "supervisor.lock").write_bytes(msgspec.json.encode(Holder(4711, host)))
        with pytest.raises(SiteError) as found:
            speak(parser().parse_args([*verb, "--run-dir", str(run)]))
        return str(found.value)

    run = tmp_path / "run"
    socket_of(run, at=1).close()
    if not has_socket:
        (run / "control.sock").unlink()
    nobody = f"no control plane is running in {run} (control.sock does not answer)"
    here = os.uname().nodename
    assert said(here) == nobody
    elsewhere = (
        f" on this machine, {here}: the run was last led by libra-supervisor pid 4711 on gpu01, "
        "where the same command gets its answer"
    )
    assert said("gpu01") == (nobody + elsewhere if has_socket else nobody)


def order_of(*arguments):
    return _order_in(parser().parse_args(["replan", *arguments]))


def test_replan_names_a_plan_or_leaves_it_to_the_planner():
    assert order_of() is None
    assert order_of("--dry-run") is None
    assert order_of("--hybrids", "0") == PlanOrder(hybrids=0)
    assert order_of("--instances", "0") == PlanOrder(instances=())
    assert order_of(
        *("--train-gpus", "8", "--train-tp-size", "2", "--train-pp-size", "3"),
        *("--train-cp-size", "4", "--train-ep-size", "5", "--instances", "2x1,1x4"),
    ) == PlanOrder(
        train_gpus=8,
        train_tp_size=2,
        train_pp_size=3,
        train_cp_size=4,
        train_ep_size=5,
        instances=(TpBucket(count=2, tp=1), TpBucket(count=1, tp=4)),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("--instances", words)
            for words in ("2", "2x", "0x1", "1x0", "2y1", "1x1,", "", "1x1x1")
        ),
        ("--hybrids", "-1"),
        ("--train-gpus", "0"),
        ("--train-tp-size", "two"),
    ],
)
def test_what_is_no_plan_is_a_wrong_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        order_of(*arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["drain", "undrain"])
def test_a_node_is_named_by_its_rank(verb, capsys):
    assert parser().parse_args([verb, "--node", "0"]).node == 0
    for wrong in ("-1", "x", "1.5", ""):
        with pytest.raises(SystemExit):
            parser().parse_args([verb, f"--node={wrong}"])
        assert f"{wrong} is no node; they are numbers, from 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser().parse_args([verb, "--help"])
    assert "every rollout instance on this node" in capsys.readouterr().out


def test_other_verbs_name_no_plan():
    assert _order_in(parser().parse_args(["stop"])) is None


def test_a_control_plane_that_stands_still_is_the_site_s_fault(tmp_path):
    run = tmp_path / "run"
    said = f"{run} did not answer within 0.1 s: its process stands still"
    with socket_of(run, at=1), pytest.raises(SiteError, match=said):
        _call(RunDirectory(run), "GET", "/v1/status", b"", timeout_s=0.1)

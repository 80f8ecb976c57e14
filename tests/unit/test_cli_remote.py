"""Which run a verb talks to when none is named."""

import os

import pytest

from libra.errors import SiteError
from libra_supervisor.cli.remote import _newest
from libra_supervisor.process.peer import listen


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

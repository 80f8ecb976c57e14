import fcntl
import multiprocessing
import os

import pytest

from libra.errors import SiteError
from libra_supervisor.cli.run import made_and_held
from libra_supervisor.run_directory import LOCK_NAME, RunDirectory, held


def hold_until_told(path, conn):
    with held(RunDirectory(path)):
        conn.send("held")
        conn.recv()


def test_a_second_supervisor_is_refused_and_told_who_holds_the_directory(tmp_path):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    first = context.Process(target=hold_until_told, args=(tmp_path, theirs))
    first.start()
    try:
        assert ours.recv() == "held"
        with (
            pytest.raises(SiteError, match=f"pid {first.pid} on {os.uname().nodename}"),
            held(RunDirectory(tmp_path)),
        ):
            pass
    finally:
        first.kill()
        first.join()
        ours.close()
        theirs.close()
    with held(RunDirectory(tmp_path)):
        assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()


def test_a_lock_file_that_says_nothing_is_still_a_refusal(tmp_path):
    with held(RunDirectory(tmp_path)):
        (tmp_path / LOCK_NAME).write_text("")
        with (
            pytest.raises(SiteError, match="another libra-supervisor"),
            held(RunDirectory(tmp_path)),
        ):
            pass


class TakenAtOnce(RunDirectory):
    """Another supervisor takes it in the moment between its making and its lock."""

    def create(self):
        is_new = super().create()
        fd = os.open(self.root / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return is_new


def test_who_loses_the_race_for_a_new_directory_leaves_it_to_the_winner(tmp_path):
    directory = TakenAtOnce(tmp_path / "run")
    with pytest.raises(SiteError, match="is in use"), made_and_held(directory):
        pass
    assert directory.logs.is_dir()


def test_a_directory_made_for_a_run_that_never_began_is_taken_away(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(SiteError, match="no GPU"), made_and_held(directory):
        raise SiteError("no GPU")
    assert not directory.root.exists()
    directory.create()
    with pytest.raises(SiteError, match="no GPU"), made_and_held(directory):
        raise SiteError("no GPU")
    assert directory.logs.is_dir()

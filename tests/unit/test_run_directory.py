import multiprocessing
import os

import pytest

from libra.errors import SiteError
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

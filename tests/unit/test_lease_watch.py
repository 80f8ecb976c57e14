"""Ranks that end with the lease of their node."""

import subprocess
import sys

import msgspec
import pytest

from libra import clock
from libra.config.nodes import NodesConfig
from libra.errors import SiteError
from libra.storage.lease_file import LeaseFile, LeaseReader
from libra.trainer.lease_watch import _PERIOD_S, SLACK_S, watch_lease
from libra_supervisor.nodes.lease import LeaseTerms

RANK = """
import sys, time
from pathlib import Path
from libra.trainer.lease_watch import watch_lease
watch_lease(Path(sys.argv[1]))
print("watches", flush=True)
time.sleep(600)
"""


def test_a_rank_ends_when_nobody_renews_the_lease_any_more(tmp_path):
    path = tmp_path / "lease"
    file = LeaseFile(path)
    file.write(clock.monotonic() + 600.0)
    with subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-c", RANK, str(path)], stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout.readline() == "watches\n"
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(1.0)
        # It has the file open: who removes its name changes nothing.
        path.unlink()
        file.write(clock.monotonic() + 1.0)
        assert rank.wait(30) == 4
    file.close()


def test_what_is_written_is_what_is_read(tmp_path):
    file = LeaseFile(tmp_path / "lease")
    reader_of = tmp_path / "lease"
    for until in (0.0, 12345.678, -1.5):
        file.write(until)
        assert LeaseReader(reader_of).until() == until
    file.close()


def test_a_lease_that_is_not_there_is_the_site_s_fault(tmp_path):
    with pytest.raises(SiteError, match="cannot be read"):
        watch_lease(tmp_path / "gone")


def test_a_rank_has_ended_before_its_node_counts_as_lost_however_short_the_lease():
    shortest = msgspec.convert({"node_lease_s": 1}, NodesConfig).node_lease_s
    terms = LeaseTerms(lease_s=shortest, orphan_grace_s=0.0)
    left_s = terms.lost_after_s - terms.lease_s
    # Looked at a period late at most; the rest is for a machine that is slow to run it.
    assert left_s * 0.6 >= SLACK_S + _PERIOD_S

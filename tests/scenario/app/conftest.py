import os
import socket

import pytest

from fake_runs import FakeRun


@pytest.fixture
def fake_run(tmp_path):
    """Makes runs on fake servers and ranks, and ends them whatever the test did."""
    made = []

    def make(**options):
        folder = tmp_path / f"{len(made)}"
        folder.mkdir()
        made.append(FakeRun(folder, **options))
        return made[-1]

    yield make
    for run in made:
        run.end()


@pytest.fixture
def free_ports():
    """Gives the first of some ports in a row that are free now and outside the ephemeral range."""

    def find(count):
        for base in range(21_000 + 16 * (os.getpid() % 500), 30_000, 16):
            if all(is_free(base + k) for k in range(count)):
                return base
        raise RuntimeError("no free ports")

    return find


def is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

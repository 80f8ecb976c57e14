"""The group of a weight transfer over hosts with addresses of their own."""

import os
import sys
from pathlib import Path

import psutil
import pytest
import torch

from libra.transfer.group import Place, Signals, join, open_store, own_address
from libra.transfer.outcome import TransferAbortedError
from netns_hosts import hosts
from processes import CHILDREN

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def beat():
    pass


def test_members_on_other_hosts_get_what_rank_0_sends(tmp_path):
    paths = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": paths}
    with hosts(3) as made:
        host = made.addresses[0]
        store, port = open_store(host)
        listening = [
            it.laddr.ip
            for it in psutil.Process().net_connections("tcp")
            if it.status == psutil.CONN_LISTEN and it.laddr.port == port
        ]
        assert listening == [host]
        for rank in (1, 2):
            argv = [sys.executable, str(CHILDREN / "transfer_member.py"), host, port, rank, 3]
            made.run(rank, list(map(str, argv)), log=tmp_path / f"{rank}.out", env=env)
        signals = Signals(store, "g")
        place = Place(0, 3, torch.device("cpu"), own_address(host, port))
        group = join(signals, place, timeout_s=60.0, stall_s=30.0, beat=beat)
        group.wait(group.broadcast(torch.arange(5.0)), stall_s=30.0, beat=beat)
        for rank in (1, 2):
            signals.wait(
                lambda rank=rank: signals.heard(f"got/{rank}") is not None,
                timeout_s=30.0,
                what="what was received",
                beat=beat,
            )
            assert signals.heard(f"got/{rank}") == f"{made.addresses[rank]} 10"
        group.close()


def test_a_host_without_a_way_to_the_trainer_is_told_so():
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(TransferAbortedError, match="no way to the trainer at no-such"):
        own_address("no-such-host.invalid", 9)

"""The group of a transfer comes together, or everybody is told why not."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from libra.transfer import group
from libra.transfer.group import Place, Signals, connect_store, join, open_store
from libra.transfer.outcome import TransferAbortedError

pytestmark = pytest.mark.system
CPU = torch.device("cpu")


def beat():
    pass


@pytest.fixture
def place():
    """Signals of two members: of who has the store and of who reaches it."""
    store, port = open_store()
    return Signals(store, "g"), Signals(connect_store("127.0.0.1", port), "g")


def joined(signals, rank):
    return join(signals, Place(rank, 2, CPU), timeout_s=60.0, stall_s=60.0, beat=beat)


def test_two_members_reach_each_other(place):
    groups = {}
    other = threading.Thread(target=lambda: groups.update({1: joined(place[1], 1)}))
    other.start()
    groups[0] = joined(place[0], 0)
    other.join()
    sent, received = torch.arange(5.0), torch.zeros(5)
    works = [groups[0].broadcast(sent), groups[1].broadcast(received)]
    for rank, work in enumerate(works):
        groups[rank].wait(work, stall_s=60.0, beat=beat)
    assert torch.equal(sent, received)


def test_a_member_that_dies_while_all_connect_frees_the_others(place, monkeypatch):
    monkeypatch.setattr(group, "FORM_TIMEOUT_S", 3600.0)
    ours, theirs = place
    # It is there, but never connects; the control plane then tells that its process was lost.
    theirs.count("joined", more=1)
    threading.Timer(0.3, theirs.abort, ["vllm-0: its process was lost"]).start()
    with pytest.raises(TransferAbortedError, match="vllm-0: its process was lost"):
        joined(ours, 0)


def test_rank_0_is_freed_by_what_it_looks_at_itself(place, monkeypatch):
    monkeypatch.setattr(group, "FORM_TIMEOUT_S", 3600.0)
    ours, theirs = place
    theirs.count("joined", more=1)
    looks = iter(range(30))

    def look():
        if next(looks) == 20:
            raise TransferAbortedError("given up by the control plane")

    with pytest.raises(TransferAbortedError, match="given up"):
        join(ours, Place(0, 2, CPU), timeout_s=60.0, stall_s=60.0, beat=look)
    assert theirs.heard("abort") == "rank 0 could not join: given up by the control plane"


class FakeNccl:
    """The calls that a member makes on NCCL; its first broadcast is done after some looks."""

    def __init__(self, looks):
        self.looks, self.calls = looks, []
        self.was_aborted = threading.Event()

    def eager_connect_single_device(self, device):
        self.calls.append("connect")

    def broadcast(self, tensors, options):
        self.calls.append(f"broadcast {tensors[0].numel()} from {options.rootRank}")
        return self

    def is_completed(self):
        self.looks -= 1
        return self.looks < 0

    def abort(self):
        self.was_aborted.set()


def nccl(monkeypatch, fake, *, is_given_up=False):
    fakes = SimpleNamespace(
        ProcessGroupNCCL=lambda *_: fake, BroadcastOptions=dist.BroadcastOptions
    )
    fakes.ProcessGroupNCCL.Options = SimpleNamespace
    monkeypatch.setattr(group, "dist", fakes)
    given_up = threading.Event()
    if is_given_up:
        threading.Timer(0.1, given_up.set).start()
    return group._nccl(given_up, None, Place(0, 2, CPU), 60.0)


def test_nccl_connects_its_members_before_any_is_ready(monkeypatch):
    fake = FakeNccl(looks=3)
    assert nccl(monkeypatch, fake) is fake
    assert (fake.calls, fake.looks) == (["connect", "broadcast 1 from 0"], -1)


def test_what_waits_on_the_device_goes_when_the_group_is_given_up(monkeypatch):
    fake = FakeNccl(looks=1_000_000)
    with pytest.raises(RuntimeError, match="given up"):
        nccl(monkeypatch, fake, is_given_up=True)
    assert fake.was_aborted.wait(30.0)
    assert fake in [backend for backend, _ in group._LEFT]


def test_whoever_connects_hears_that_the_group_was_given_up(place, monkeypatch):
    heard = threading.Event()

    def connecting(is_given_up, *_):
        is_given_up.wait(60.0)
        heard.set()
        raise RuntimeError("given up")

    monkeypatch.setattr(group, "_nccl", connecting)
    ours, theirs = place
    theirs.count("joined", more=1)
    threading.Timer(0.1, theirs.abort, ["vllm-0: its process was lost"]).start()
    on_gpu = Place(0, 2, torch.device("cuda"))
    with pytest.raises(TransferAbortedError, match="its process was lost"):
        join(ours, on_gpu, timeout_s=60.0, stall_s=60.0, beat=beat)
    assert heard.wait(30.0)

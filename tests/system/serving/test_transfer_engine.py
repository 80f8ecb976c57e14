"""The worker's end of a transfer against the sender's, over gloo, without a server around it."""

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from libra.errors import PeerError
from libra.serving.transfer_engine import TransferEngine
from libra.transfer.group import Signals, connect_store
from libra.transfer.outcome import TransferAbortedError
from libra.transfer.sender import Sender
from libra.wire.instance import TransferTensor, WeightsTransfer
from trainer_gang import trainer_environment

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

CPU = torch.device("cpu")
CHILDREN = Path(__file__).parents[2] / "support/children"
TENSORS = tuple(
    TransferTensor(f"layers.{k}.weight", dtype, (3, k + 1))
    for k, dtype in enumerate(["F32", "BF16", "F32", "F16"] * 6)
)
DTYPE = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Model(torch.nn.Linear):
    """What was loaded, in order; `fault` is raised at the second bucket."""

    def __init__(self):
        super().__init__(1, 1)
        self.loaded, self.num_loads, self.fault = {}, 0, None

    def load_weights(self, weights):
        self.num_loads += 1
        if self.fault is not None and self.num_loads == 2:
            raise self.fault
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


def worker(rank: int = 0) -> TransferEngine:
    of_vllm = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank), model_config=None)
    return TransferEngine(None, of_vllm, CPU, Model())


class Server(threading.Thread):
    """One worker in a thread: joins, receives, and keeps what came of it."""

    def __init__(self, transfer, nonce, *, rank_offset, engine=None, is_joined=False):
        super().__init__()
        self.engine = worker() if engine is None else engine
        self._transfer, self._nonce = msgspec.msgpack.encode(transfer), nonce
        self._rank_offset, self._is_joined = rank_offset, is_joined
        self.error = None
        self.start()

    def run(self):
        join = {"transfer": self._transfer, "rank_offset": self._rank_offset}
        receive = {"transfer": self._transfer, "nonce": self._nonce}
        try:
            if not self._is_joined:
                self.engine.init_transfer_engine(self.engine.parse_init_info(join))
            self.engine.update_weights(receive)
        except PeerError as error:
            self.error = error
            self.engine.abort(str(error))


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        it.name: torch.rand(it.shape, generator=generator).to(DTYPE[it.dtype]) for it in TENSORS
    }


@pytest.fixture
def aborted():
    """Reasons by group, as the supervisor would give them."""
    return {}


@pytest.fixture
def sender(aborted):
    sender = Sender(CPU, beat=lambda: None, abort_reason=aborted.get)
    yield sender
    sender.leave("the test is over")


def transfer_of(sender, *, world_size=3, group_id="g", **limits) -> WeightsTransfer:
    return WeightsTransfer(
        group_id=group_id,
        store_host=sender.host,
        store_port=sender.port,
        world_size=world_size,
        rank_offset_of={},
        tied_embeddings=False,
        tensors=TENSORS,
        **{"bucket_bytes": 32, "timeout_s": 30.0, "stall_s": 10.0} | limits,
    )


def send(sender, transfer, nonce, named, *, gathered=None) -> str:
    summed = []

    def gather():
        for name, tensor in named.items():
            if gathered is not None:
                gathered.append(name)
            yield name, tensor

    sender.send(transfer, nonce, gather, on_summed=summed.append)
    return summed[0]


def test_every_worker_has_what_was_sent_and_the_group_stays_for_the_next_version(sender):
    transfer = transfer_of(sender)
    engines = [worker(), worker(1)]
    for version in (1, 2):
        # Rank 1 is one server's only worker, rank 2 the second of another's.
        servers = [
            Server(transfer, f"n{version}", rank_offset=1, engine=it, is_joined=version == 2)
            for it in engines
        ]
        checksum = send(sender, transfer, f"n{version}", values(version))
        for server in servers:
            server.join()
            assert server.error is None
            assert server.engine.checksum == checksum
            assert all(
                torch.equal(server.engine.model.loaded[name], tensor)
                for name, tensor in values(version).items()
            )
    assert engines[0].model.num_loads > 4, "it went through several buckets"


def test_bytes_that_are_not_the_senders_are_refused(sender, monkeypatch):
    transfer = transfer_of(sender, world_size=2)
    server = Server(transfer, "n", rank_offset=1)
    # The sender's word for what it sent, of other bytes.
    monkeypatch.setattr("libra.transfer.sender.Checksum.value", torch.tensor([7]))
    monkeypatch.setattr(
        "libra.serving.transfer_engine.checksum_text", lambda value: format(int(value), "x")
    )
    monkeypatch.setattr("libra.serving.transfer_engine.Checksum", RightSum)
    send(sender, transfer, "n", values(1))
    server.join()
    assert "the weights came with checksum 8, sent was 7" in str(server.error)
    assert not isinstance(server.error, TransferAbortedError)


class RightSum:
    value = torch.tensor([8])

    def __init__(self, device):
        pass

    def add(self, buffer):
        pass


def test_a_worker_that_fails_frees_the_sender_and_the_others_and_all_is_gathered(sender):
    transfer = transfer_of(sender)
    broken = worker()
    broken.model.fault = PeerError("out of memory")
    servers = [
        Server(transfer, "n", rank_offset=1, engine=broken),
        Server(transfer, "n", rank_offset=2),
    ]
    gathered = []
    with pytest.raises(TransferAbortedError):
        send(sender, transfer, "n", values(1), gathered=gathered)
    for server in servers:
        server.join()
    assert str(servers[0].error) == "out of memory"
    assert isinstance(servers[1].error, TransferAbortedError)
    assert gathered == [it.name for it in TENSORS], "other ranks would wait for this one"
    # The next group is not touched by it.
    again = transfer_of(sender, world_size=2, group_id="h")
    server = Server(again, "m", rank_offset=1)
    assert send(sender, again, "m", values(2))
    server.join()
    assert server.error is None


def test_nobody_waits_for_a_member_that_the_control_plane_gave_up(sender, aborted):
    transfer = transfer_of(sender)
    server = Server(transfer, "n", rank_offset=1)
    aborted["g"] = "vllm-9: its process was lost"
    with pytest.raises(TransferAbortedError, match="its process was lost"):
        send(sender, transfer, "n", values(1))
    server.join()
    assert isinstance(server.error, TransferAbortedError)
    assert "its process was lost" in str(server.error)


def test_a_member_that_never_comes_is_waited_for_no_longer_than_the_timeout(sender):
    transfer = transfer_of(sender, timeout_s=0.3)
    server = Server(transfer, "n", rank_offset=1)
    with pytest.raises(TransferAbortedError, match=r"took more than 0\.3 s|could not join"):
        send(sender, transfer, "n", values(1))
    server.join()
    assert isinstance(server.error, TransferAbortedError)


def test_other_ranks_are_told_not_to_gather_when_a_transfer_cannot_begin(sender, aborted):
    transfer = transfer_of(sender)
    aborted["g"] = "given up"
    with pytest.raises(TransferAbortedError):
        send(sender, transfer, "n", values(1), gathered=[])
    other_rank = Signals(connect_store(sender.host, sender.port), "g")
    assert other_rank.heard("go/n") == "no"


def test_a_worker_notices_that_the_trainer_is_gone(monkeypatch):
    monkeypatch.setattr("libra.transfer.group.STORE_TIMEOUT", timedelta(seconds=2))
    child = subprocess.Popen(
        [sys.executable, CHILDREN / "store_holder.py"],
        stdout=subprocess.PIPE,
        text=True,
        env=trainer_environment(),
    )
    try:
        address = SimpleNamespace(host="127.0.0.1", port=int(child.stdout.readline()))
        server = Server(transfer_of(address), "n", rank_offset=1)
        while Signals(connect_store(address.host, address.port), "g").count("joined") == 0:
            pass
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    server.join()
    assert isinstance(server.error, TransferAbortedError)
    assert "the trainer is gone" in str(server.error)
    late = Server(transfer_of(address), "n", rank_offset=1)
    late.join()
    assert "the trainer's store does not answer" in str(late.error)


def test_nobody_outside_of_this_host_reaches_the_store(sender):
    port = f"{sender.port:04X}"
    listening = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        listening += [fields[1] for fields in map(str.split, lines) if fields[3] == "0A"]
    assert [it for it in listening if it.endswith(f":{port}")] == [f"0100007F:{port}"]

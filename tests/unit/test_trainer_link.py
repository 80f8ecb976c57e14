import socket
import threading
from pathlib import Path

import msgspec
import pytest

from libra.errors import SiteError
from libra.trainer.link import Link
from libra.wire.framing import FrameDecoder, encode_frame
from libra.wire.rank import (
    AbortTransfer,
    Heartbeat,
    JudgeAcks,
    RankCommand,
    RankEvent,
    Shutdown,
    TrainStep,
)
from reload_messages import reload_request


@pytest.fixture
def ends(tmp_path: Path):
    """A rank's link and the supervisor's end of it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        link = Link(tmp_path / "s")
        with listener.accept()[0] as supervisor:
            yield link, supervisor
            # Without it the link would end this process when its supervisor goes.
            tell(supervisor, Shutdown(reason="the test is over"))
            link.receive()
            link._socket.close()


def tell(supervisor: socket.socket, command: RankCommand) -> None:
    supervisor.sendall(encode_frame(msgspec.msgpack.encode(command)))


def test_an_error_behind_the_main_thread_reaches_it_while_it_waits_for_a_command(ends):
    link, _ = ends
    failed = SiteError("checkpoint of step 2: no space left on device")
    # Only handed on: were it lost, nothing would ever end this wait.
    threading.Timer(0, link.interrupt, [failed]).start()
    with pytest.raises(SiteError, match="no space left"):
        link.receive()


def test_acks_are_judged_though_the_main_thread_has_a_step_to_train_first(ends):
    link, supervisor = ends
    acks = JudgeAcks(reload_request(), ())
    tell(supervisor, TrainStep(step=3, mini_batches=()))
    tell(supervisor, acks)
    assert link.receive_acks() == acks
    assert link.receive() == TrainStep(step=3, mini_batches=())


def test_a_transfer_is_given_up_though_the_main_thread_is_in_it(ends):
    link, supervisor = ends
    tell(supervisor, AbortTransfer("group-1", "vllm-0 died"))
    tell(supervisor, TrainStep(step=3, mini_batches=()))
    # Commands come in order, so the first one has been heard; it is no work to do.
    assert link.receive() == TrainStep(step=3, mini_batches=())
    assert link.abort_reason("group-1") == "vllm-0 died"
    assert link.abort_reason("group-2") is None


def test_frames_of_two_threads_never_mix(ends):
    link, supervisor = ends
    long_phase = "p" * 50_000

    def speak(rank: int) -> None:
        for step in range(20):
            link.send(Heartbeat(rank=rank, step=step, phase=long_phase))

    speakers = [threading.Thread(target=speak, args=[rank]) for rank in (0, 1)]
    for speaker in speakers:
        speaker.start()
    decoder, heard = FrameDecoder(), []
    while len(heard) < 40:
        frames = decoder.feed(supervisor.recv(1 << 16))
        heard += [msgspec.msgpack.decode(frame, type=RankEvent) for frame in frames]
    for speaker in speakers:
        speaker.join()
    assert [e.step for e in heard if e.rank == 1] == list(range(20))

"""The supervisor's end of the rank links, and torchrun, for tests of whole trainer processes."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from libra import clock
from libra.config.load import current_environ, dump_resolved
from libra.config.run import RunConfig
from libra.wire.framing import FrameDecoder, encode_frame
from libra.wire.rank import Heartbeat, Hello, RankCommand, RankEvent, RankFailed

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests/system/trainer"
START_TIMEOUT_S = 120.0
HANG_S = 600.0
"""After which a script of torchrun is taken for hung; other work may slow it a lot."""
E = TypeVar("E")


class RankConnection:
    """One rank's socket: every event in order, heartbeats apart; what it prints goes into `log`."""

    def __init__(self, stream: socket.socket, log: Path) -> None:
        self._stream = stream
        self._log = log
        self._drains: list[Thread] = []
        self._decoder = FrameDecoder()
        self._events: list[RankEvent] = []
        self.heartbeats: list[Heartbeat] = []
        self.failure: RankFailed | None = None

    def send(self, command: RankCommand) -> None:
        self._stream.sendall(encode_frame(msgspec.msgpack.encode(command)))

    def expect(self, kind: type[E], *, timeout_s: float = 60.0) -> E:
        """The next event that is not a heartbeat, which must be a `kind`."""
        deadline = clock.monotonic() + timeout_s
        while not self._events:
            self._stream.settimeout(max(0.01, deadline - clock.monotonic()))
            chunk, pipes, _, _ = socket.recv_fds(self._stream, 1 << 20, 2)
            for pipe in pipes:
                self._drains.append(Thread(target=_drain, args=(pipe, self._log), daemon=True))
                self._drains[-1].start()
            assert chunk, f"the rank closed its socket while {kind.__name__} was awaited"
            for frame in self._decoder.feed(chunk):
                event = msgspec.msgpack.decode(frame, type=RankEvent)
                if isinstance(event, Heartbeat):
                    self.heartbeats.append(event)
                else:
                    self._events.append(event)
        event = self._events.pop(0)
        assert isinstance(event, kind), event
        return event

    def close(self) -> None:
        self._stream.close()

    def until_drained(self) -> None:
        """After the rank's end: until its last words are in the log."""
        for drain in self._drains:
            drain.join(10.0)


def _drain(pipe: int, log: Path) -> None:
    with os.fdopen(pipe, "rb", buffering=0) as source, log.open("ab", buffering=0) as sink:
        while chunk := source.read(1 << 16):
            sink.write(chunk)


class Program(NamedTuple):
    """What the ranks run."""

    arguments: Sequence[str] = ("-m", "libra.trainer")
    environment: Mapping[str, str] = MappingProxyType({})
    has_torchrun: bool = True
    """Without it one rank is started as torchrun would start it, but sooner."""


class FakeSupervisor:
    """Starts torchrun with `num_ranks` of libra.trainer and holds their links, by rank."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        num_ranks: int,
        *,
        restore: Path | None = None,
        program: Program | None = None,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        resolved = run_dir / "config.resolved.json"
        resolved.write_bytes(dump_resolved(config))
        control = run_dir / "ranks.sock"
        control.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(control))
        self._listener.listen()
        self._listener.settimeout(START_TIMEOUT_S)
        self._num_ranks = num_ranks
        self.links: dict[int, RankConnection] = {}
        self.hellos: dict[int, Hello] = {}
        self.log = run_dir / "trainer.log"
        arguments = ["--config", str(resolved), "--run-dir", str(run_dir)]
        if restore is not None:
            arguments += ["--restore", str(restore)]
        what = program or Program()
        start = start_torchrun if what.has_torchrun else start_one_rank
        self.process = start(
            [*what.arguments, *arguments],
            num_ranks,
            log=self.log,
            environment={
                "LIBRA_CONTROL": str(control),
                "LIBRA_RUN_ID": "run-under-test",
                "LIBRA_ATTEMPT": "1",
                "LIBRA_ATTEMPT_ID": "core-1",
                "LIBRA_GANG": "trainer",
                **what.environment,
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for link in self.links.values():
            link.close()
        self._listener.close()
        # The ranks end by themselves when their sockets close; torchrun then follows.
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for link in self.links.values():
            link.until_drained()
        if kind is not None:
            print(self.log.read_text()[-5000:])

    def accept_all(self) -> None:
        """Wait until every rank has connected and said Hello."""
        while len(self.links) < self._num_ranks:
            link = RankConnection(self._listener.accept()[0], self.log)
            hello = link.expect(Hello)
            self.links[hello.rank], self.hellos[hello.rank] = link, hello

    def send(self, command: RankCommand) -> None:
        for link in self.links.values():
            link.send(command)


def start_torchrun(
    arguments: list[str], num_ranks: int, *, log: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start ranks in their own session, their output in `log`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--max-restarts=0"]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--nproc-per-node={num_ranks}",
    ]
    log.unlink(missing_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=trainer_environment() | (environment or {}),
        )


def start_one_rank(
    arguments: list[str], num_ranks: int, *, log: Path, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start the only rank of a world by itself."""
    assert num_ranks == 1
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    log.unlink(missing_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The store's port: nobody else of this world has to know it.
            env=trainer_environment() | place | {"MASTER_PORT": "0"} | environment,
        )


def trainer_environment() -> dict[str, str]:
    """Our own environment, with what a trainer process outside of pytest needs."""
    environment = current_environ()
    paths = [REPOSITORY, REPOSITORY / "supervisor", REPOSITORY / "tests/support"]
    before = environment.get("PYTHONPATH")
    return dict(environment) | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [before])]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def run_ranks(script: str, num_ranks: int, *arguments: Any, log: Path) -> str:
    """Run a script of tests/system/trainer under torchrun to its end; returns its output."""
    process = start_torchrun([str(SCRIPTS / script), *map(str, arguments)], num_ranks, log=log)
    with stopped_at_exit(process):
        code = process.wait(timeout=HANG_S)
    output = log.read_text()
    assert code == 0, output[-6000:]
    return output


@contextmanager
def stopped_at_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=40)

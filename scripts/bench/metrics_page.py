#!/usr/bin/env python3
"""A /metrics page in vLLM's form and of its size, and a bare server for it.

The server is instance i0; below `/NAME/` it is the instance NAME.
"""

import asyncio
import sys

LABELS = 'engine="0",model_name="policy"'
GAUGES = {
    "vllm:num_requests_running": 8.0,
    "vllm:num_requests_waiting": 1.0,
    "vllm:kv_cache_usage_perc": 0.43,
}
COUNTERS = {
    "vllm:num_preemptions_total": 4.0,
    "vllm:prompt_tokens_total": 123456.0,
    "vllm:generation_tokens_total": 654321.0,
    "vllm:prefix_cache_queries_total": 540.0,
    "vllm:prefix_cache_hits_total": 160.0,
}
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_params_max_tokens",
)
BOUNDS = [0.001 * 1.6**k for k in range(28)]


def page_of(num_bytes: int) -> str:
    """A page of at least that many bytes: the wanted series among histogram buckets."""
    lines = ["# TYPE process_start_time_seconds gauge", "process_start_time_seconds 1.79e+09"]
    for name, value in GAUGES.items():
        lines += [f"# HELP {name} A gauge.", f"# TYPE {name} gauge", f"{name}{{{LABELS}}} {value}"]
    for name, value in COUNTERS.items():
        lines += [f"# TYPE {name} counter", f"{name}{{{LABELS}}} {value}"]
    for reason in ("capacity", "deferred"):
        lines.append(f'vllm:num_requests_waiting_by_reason{{{LABELS},reason="{reason}"}} 0.0')
    config = 'block_size="32",cache_dtype="auto",engine="0",kv_cache_size_tokens="1536"'
    lines.append(f'vllm:cache_config_info{{{config},num_gpu_blocks="48"}} 1.0')
    size, serial = sum(map(len, lines)), 0
    while size < num_bytes:
        name = f"vllm:{HISTOGRAMS[serial % len(HISTOGRAMS)]}"
        suffix = "" if serial < len(HISTOGRAMS) else f"_{serial // len(HISTOGRAMS)}"
        added = [f"# TYPE {name}{suffix} histogram"]
        added += [f'{name}{suffix}_bucket{{{LABELS},le="{bound:.4g}"}} 12.0' for bound in BOUNDS]
        lines += added
        size, serial = size + sum(map(len, added)) + len(added), serial + 1
    return "\n".join([*lines, ""])


class _Server(asyncio.Protocol):
    """Answers any request with the page, or with nothing for /health."""

    page = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._pending = b""

    def data_received(self, data: bytes) -> None:
        self._pending += data
        while b"\r\n\r\n" in self._pending:
            request, _, self._pending = self._pending.partition(b"\r\n\r\n")
            path = request.split(b" ", 2)[1]
            prefix, _, name = path.rpartition(b"/")
            body = b"" if name == b"health" else self.page
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nX-Libra-Instance: %b\r\nContent-Type: text/plain\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (prefix.strip(b"/") or b"i0", len(body), body)
            )


async def _serve() -> None:
    _Server.page = page_of(57_000).encode()
    server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1])
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve())

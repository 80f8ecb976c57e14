"""Cost of one phase-trace span: CPU time in microseconds, median of rounds, as JSON.

bench_trace.py [--spans 5000] [--rounds 9]
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from libra.tracing.span import Phase, SpanWriter, trace_path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        writer = SpanWriter(trace_path(Path(folder), 0), rank=0, run_id="bench")
        rounds = [cpu_us_per_span(writer, options.spans) for _ in range(options.rounds)]
        writer.close()
    print(json.dumps({"span_cpu_us": {"median": statistics.median(rounds), "min": min(rounds)}}))


def cpu_us_per_span(writer: SpanWriter, num_spans: int) -> float:
    began = time.process_time()
    for step in range(num_spans):
        with writer.span(Phase.GRPO_UPDATE, step=step):
            pass
    return (time.process_time() - began) / num_spans * 1e6


if __name__ == "__main__":
    main()

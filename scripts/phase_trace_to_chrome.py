#!/usr/bin/env python3
"""Convert phase traces for chrome://tracing or ui.perfetto.dev.

    scripts/phase_trace_to_chrome.py RUN_DIR [BASELINE_RUN_DIR]... [-o trace.json]

Several runs are laid side by side, each starting at zero.
"""

import argparse
import sys
from pathlib import Path

from libra.errors import LibraError
from libra.tracing.chrome import labels_for, write_chrome_trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", type=Path, help="run directories or trace files")
    parser.add_argument("-o", "--output", type=Path, default=Path("phase_trace.json"))
    options = parser.parse_args()
    try:
        num_events = write_chrome_trace(labels_for(options.sources), options.output)
    except LibraError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{options.output}: {num_events} events")
    return 0


if __name__ == "__main__":
    sys.exit(main())

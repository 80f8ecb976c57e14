"""The verb trace: phase traces of runs in one file for Perfetto or Chrome."""

import sys
from argparse import Namespace

from libra.tracing.chrome import labels_for, write_chrome_trace


def trace(options: Namespace) -> int:
    num_events = write_chrome_trace(labels_for(options.sources), options.output)
    sys.stdout.write(f"{options.output}: {num_events} events\n")
    return 0

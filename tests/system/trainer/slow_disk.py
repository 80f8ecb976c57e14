"""`python -m libra.trainer` whose disk holds what lies below SLOW_BELOW until SLOW_GATE exists."""

import os
import sys
import time
from pathlib import Path

from libra.config.load import current_environ
from libra.trainer import cpu_path
from libra.trainer.__main__ import main
from libra.trainer.rank_lines import mark_output


def slow_down(environ) -> None:
    cpu_path.enable()
    from libra.trainer.megatron_checkpoint import StagedState  # after the CPU is enabled

    honest_write = StagedState.write

    def write(staged, **options):
        if Path(environ["SLOW_BELOW"]) in staged._directory.parents:
            while not Path(environ["SLOW_GATE"]).exists():
                time.sleep(0.02)
        return honest_write(staged, **options)

    StagedState.write = write


if __name__ == "__main__":
    started_with = current_environ()
    mark_output(int(started_with["RANK"]))
    slow_down(started_with)
    code = main(sys.argv[1:], started_with)
    sys.stdout.flush()
    os._exit(code)

"""`python -m libra.trainer` on a disk that takes no file larger than FULL_AT bytes."""

import os
import resource
import signal
import sys

from libra.config.load import current_environ
from libra.trainer.__main__ import main
from libra.trainer.rank_lines import mark_output

if __name__ == "__main__":
    started_with = current_environ()
    mark_output(int(started_with["RANK"]))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = int(started_with["FULL_AT"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    code = main(sys.argv[1:], started_with)
    sys.stdout.flush()
    os._exit(code)

"""`python -m libra.trainer` with streams on its lane that so small a model is not worth."""

import os
import sys

from libra.config.load import current_environ
from libra.hybrid import member, streams
from libra.trainer.__main__ import main
from libra.trainer.rank_lines import mark_output


def four_parts_of(count, num_streams):
    assert num_streams == 4, "the lane has fewer streams than the test is about"
    return streams.parts_of(count, num_streams)


if __name__ == "__main__":
    started_with = current_environ()
    mark_output(int(started_with["RANK"]))
    streams._STREAM_VALUES = 1000
    member.parts_of = four_parts_of
    code = main(sys.argv[1:], started_with)
    sys.stdout.flush()
    os._exit(code)

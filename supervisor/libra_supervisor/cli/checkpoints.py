"""Verbs that begin with a checkpoint: export."""

import sys
from argparse import Namespace

from libra.config.load import current_environ
from libra_supervisor.app.exporting import export_checkpoint, run_of
from libra_supervisor.app.launch import new_run_id
from libra_supervisor.app.recall import recorded_run_id


def export(options: Namespace) -> int:
    """Write a checkpoint's weights; prints where they are."""
    directory = run_of(options.checkpoint)
    run_id = recorded_run_id(directory) or new_run_id(directory)
    export_checkpoint(options.checkpoint, options.out, run_id=run_id, environ=current_environ())
    sys.stdout.write(f"{options.out.resolve()}\n")
    return 0

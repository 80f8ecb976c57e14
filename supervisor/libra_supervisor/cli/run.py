"""`libra-supervisor run`: one run in this process."""

import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from libra.config.load import current_environ, load_config
from libra.errors import LibraError
from libra.tracing.log import set_up_logging
from libra_supervisor.app.launch import RunRequest, choose_directory, plan_in_words, prepare
from libra_supervisor.app.prompts import open_prompts
from libra_supervisor.app.run import run_to_end
from libra_supervisor.display.console import display_on
from libra_supervisor.notify import Notifier, start_extended
from libra_supervisor.run_directory import RunDirectory, held
from libra_supervisor.validate.names import shipped_names


def run(options: Namespace) -> int:
    environ = current_environ()
    loaded = load_config(options.config, options.overrides, environ, shipped=shipped_names())
    for warning in loaded.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    request = RunRequest(
        loaded=loaded,
        config_path=options.config,
        environ=environ,
        run_directory=options.run_dir,
        is_resume=options.resume,
    )
    directory = choose_directory(request)
    if options.dry_run:
        launch = prepare(request, directory, writes=False)
        open_prompts(launch.config)
        sys.stdout.write(f"{directory.root}\n{plan_in_words(launch.plan)}\n")
        return 0
    with _made(directory), held(directory), display_on(sys.stderr) as display:
        event_log = set_up_logging(directory.control_log, show=display.log, level=options.log_level)
        try:
            # Planning a large site or tokenising a large data set takes minutes.
            start_timeout_s = loaded.config.supervision.start_timeout_s
            notifier = Notifier.from_environment(environ)
            with start_extended(notifier, at_most_s=start_timeout_s):
                launch = prepare(request, directory, writes=True)
                prompts = open_prompts(launch.config)
            sys.stderr.write(f"run directory {directory.root}\n")
            outcome = anyio.run(
                run_to_end, launch, prompts, display, backend_options={"use_uvloop": True}
            )
        finally:
            event_log.close()
    if outcome.exit_code:
        sys.stderr.write(f"libra-supervisor run: {outcome.reason}\n")
    return outcome.exit_code


@contextmanager
def _made(directory: RunDirectory) -> Iterator[None]:
    """Make the directory; one that was made for a run that never began is taken away again."""
    was_there = directory.root.exists()
    directory.create()
    try:
        yield
    except LibraError:
        if not was_there:
            shutil.rmtree(directory.root)
        raise

"""`libra-supervisor run`, `fork` and `eval`: one run in this process."""

import gc
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import anyio
import msgspec

from libra.config.load import LoadedConfig, current_environ, load_config
from libra.errors import ConfigError, LibraError
from libra.planner.plan import places_in_words, plan_in_words
from libra.storage.checkpoints import read_checkpoint_manifest
from libra.tracing.log import set_up_logging
from libra.workflows.loading import warning_of
from libra_supervisor.app.following import Following, follow, node_directory, speaking_for
from libra_supervisor.app.forking import plant_checkpoint
from libra_supervisor.app.launch import (
    Launch,
    RunRequest,
    choose_directory,
    prepare,
)
from libra_supervisor.app.prompts import Prompts, open_prompts
from libra_supervisor.app.run import run_to_end
from libra_supervisor.app.scoring import check_reward
from libra_supervisor.display.console import display_on
from libra_supervisor.doctor.devices import cuda_devices, resolved_device
from libra_supervisor.nodes.site import Site, site_of
from libra_supervisor.nodes.token import node_token
from libra_supervisor.notify import Notifier, start_extended
from libra_supervisor.records.evaluation import EvaluationRecord
from libra_supervisor.records.reader import last_evaluation
from libra_supervisor.run_directory import RunDirectory, held
from libra_supervisor.validate.names import shipped_names


def run(options: Namespace) -> int:
    return _run(options, begin=lambda _launch, _prompts: None)


def fork(options: Namespace) -> int:
    """Run from the state of another run's checkpoint."""

    def plant(launch: Launch, prompts: Prompts) -> None:
        step = plant_checkpoint(options.checkpoint, launch.directory, launch.config, prompts)
        sys.stderr.write(f"goes on from step {step} of {options.checkpoint}\n")

    return _run(options, begin=plant)


def evaluate(options: Namespace) -> int:
    """Evaluate a checkpoint: a run that begins with it, has nothing to train, and is over then."""
    step = read_checkpoint_manifest(options.checkpoint).step
    # Behind the user's own: nothing may be trained, and nothing saved.
    options.overrides = [*options.overrides, f"total_steps={step}", "save_interval=0"]
    planted: list[RunDirectory] = []

    def plant(launch: Launch, prompts: Prompts) -> None:
        if prompts.evaluated is None:
            raise ConfigError("eval_data is not set: name the prompts to evaluate on")
        directory = launch.directory
        plant_checkpoint(options.checkpoint, directory, launch.config, prompts, trains=False)
        planted.append(directory)

    exit_code = _run(options, begin=plant)
    if exit_code == 0 and planted:
        record = last_evaluation(planted[0].evaluations)
        sys.stdout.write(msgspec.json.encode(record).decode() if options.as_json else said(record))
    return exit_code


def said(record: EvaluationRecord) -> str:
    """An evaluation in a few lines."""
    summary = record.summary
    num_samples = max(int(k) for k in summary.pass_at)
    passed = ", ".join(f"pass@{k} {rate:.4f}" for k, rate in summary.pass_at.items())
    return (
        f"v{record.policy_version}: avg@{num_samples} {summary.reward_mean:.4f}, {passed}\n"
        f"{summary.num_rows} rows, {summary.num_trajectories} trajectories, "
        f"{summary.num_failed} failed; {summary.response_tokens_mean:.1f} tokens, "
        f"{summary.truncated_fraction:.1%} truncated; {record.eval_s:.1f} s\n"
    )


def _run(  # noqa: PLR0915 - the steps of a start, in their order
    options: Namespace, *, begin: Callable[[Launch, Prompts], None]
) -> int:
    """`begin` prepares the run's directory, which is held, before anything is started."""
    environ = current_environ()
    loaded = load_config(options.config, options.overrides, environ, shipped=shipped_names())
    site = site_of(
        loaded.config.cluster,
        loaded.environment,
        node_rank=getattr(options, "node_rank", None),
    )
    if options.resume and (site is None or site.leads):
        _say_if_nothing_to_resume(options)
    for warning in loaded.warnings:
        sys.stderr.write(f"warning: {warning}\n")
    token = "" if site is None else _shared_token(options, loaded)
    if site is not None and not site.leads:
        if options.dry_run:
            raise ConfigError(
                f"this is node {site.rank}, which follows: --dry-run shows what the leader would "
                f"do; run it on node 0 ({site.hosts[0]})"
            )
        return _follow(options, loaded, environ, site, token)
    request = RunRequest(
        loaded=loaded,
        config_path=options.config,
        environ=environ,
        run_directory=options.run_dir,
        is_resume=options.resume,
        site=site,
        node_token=token,
    )
    directory = choose_directory(request)
    if options.dry_run:
        launch = prepare(request, directory, writes=False)
        _opened(launch)
        for found in launch.in_the_way:
            sys.stderr.write(f"warning: {found}; this run can start when that has ended\n")
        sys.stdout.write(
            f"{directory.root}\n{plan_in_words(launch.plan)}\n{places_in_words(launch.plan)}"
        )
        return 0
    with made_and_held(directory), display_on(sys.stderr) as display:
        event_log = set_up_logging(directory.control_log, show=display.log, level=options.log_level)
        try:
            # Planning a large site or tokenising a large data set takes minutes.
            start_timeout_s = loaded.config.supervision.start_timeout_s
            notifier = Notifier.from_environment(environ)
            with start_extended(notifier, at_most_s=start_timeout_s):
                launch = prepare(request, directory, writes=True)
                prompts = _opened(launch)
            begin(launch, prompts)
            sys.stderr.write(f"run directory {directory.root}\n")
            # What start-up made lives to the end: a full collection need not stop the loop for it.
            gc.collect()
            gc.freeze()
            outcome = anyio.run(
                run_to_end, launch, prompts, display, backend_options={"use_uvloop": True}
            )
        finally:
            event_log.close()
    if outcome.exit_code:
        sys.stderr.write(f"libra-supervisor {options.verb}: {outcome.reason}\n")
    return outcome.exit_code


def _say_if_nothing_to_resume(options: Namespace) -> None:
    """Before anything else: a name that was mistyped would train from step 1 without a word.

    No error, since units and job scripts always pass --resume. Without --run-dir it is one.
    """
    if options.run_dir is None:
        return
    directory = RunDirectory(options.run_dir.resolve())
    if not directory.resolved_config_json.exists():
        sys.stderr.write(
            f"warning: --resume: {directory.root} holds no run; A NEW RUN BEGINS there at step 1. "
            "If you meant to go on with one, stop this and name its --run-dir\n"
        )


def _opened(launch: Launch) -> Prompts:
    """Everything of the user's that is read, checked before anything of the run is started."""
    data = launch.config.data
    check_reward(data, launch.environ)
    prompts = open_prompts(launch.config)
    is_plain = not prompts.dataset.task(int(prompts.dataset.rows[0])).messages
    if warning := warning_of(
        data.workflow, data.workflow_args, prompts.tokenizer, is_plain=is_plain
    ):
        sys.stderr.write(f"warning: {warning}\n")
    return prompts


def _shared_token(options: Namespace, loaded: LoadedConfig) -> str:
    """The secret of the nodes. Raises ConfigError for what several nodes cannot do."""
    if options.verb != "run":
        raise ConfigError(f"{options.verb} uses one node; leave out nodes, or run it without srun")
    if options.run_dir is None:
        raise ConfigError(
            "a run over several nodes needs --run-dir, the same for all of them and on a file "
            "system that they share"
        )
    return node_token(loaded.config.cluster.node_token_file, loaded.environment)


def _follow(
    options: Namespace,
    loaded: LoadedConfig,
    environ: Mapping[str, str],
    site: Site,
    token: str,
) -> int:
    """Be one of the nodes that do not lead."""
    directory = RunDirectory(options.run_dir.resolve())
    own = node_directory(directory, site.rank)
    own.create()
    device = resolved_device(loaded.config.control.device, environ)
    following = Following(
        site=site,
        config=loaded.config,
        environ=environ,
        directory=directory,
        token=token,
        devices=cuda_devices(environ) if device == "cuda" else (),
    )
    with speaking_for(site.rank, own), display_on(sys.stderr) as display:
        event_log = set_up_logging(own.control_log, show=display.log, level=options.log_level)
        try:
            outcome = anyio.run(follow, following, backend_options={"use_uvloop": True})
        finally:
            event_log.close()
    if outcome.exit_code:
        sys.stderr.write(f"libra-supervisor {options.verb}: {outcome.reason}\n")
    return outcome.exit_code


@contextmanager
def made_and_held(directory: RunDirectory) -> Iterator[None]:
    """Make and hold the directory; one made for a run that never began is taken away again.

    Only by who holds it: of two that start at once, one makes it and the other may be in it.
    """
    is_new = directory.create()
    with held(directory):
        try:
            yield
        except LibraError:
            if is_new:
                shutil.rmtree(directory.root)
            raise

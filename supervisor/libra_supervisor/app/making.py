"""What makes trajectories on a node, the one that leads or another: runner and shared load."""

from pathlib import Path
from random import Random

from libra.config.run import RunConfig
from libra.data.dataset import PromptDataset
from libra.ids import NodeRank, RunId
from libra.scheduling.scheduler import Scheduler
from libra.tracing.span import SpanWriter, node_trace_path, trace_path
from libra.workflows.loading import load_workflow
from libra_supervisor.nodes.site import LEADER
from libra_supervisor.rollouts.client import GenerationSettings, Router
from libra_supervisor.rollouts.runner import Post, RolloutRunner, RunnerParts, Scorer
from libra_supervisor.run_directory import RunDirectory
from libra_supervisor.shared_load.directory import SharedDirectory
from libra_supervisor.shared_load.exchange import LoadExchange


def rollout_runner(
    config: RunConfig, tasks: PromptDataset, *, router: Router, scorer: Scorer, post: Post
) -> RolloutRunner:
    """A runner of the configured workflow on these tasks; nothing is started."""
    return RolloutRunner(
        RunnerParts(
            tasks=tasks,
            workflow=load_workflow(config.data.workflow, config.data.workflow_args),
            tokenizer=tasks.tokenizer,
            router=router,
            scorer=scorer,
            post=post,
            settings=GenerationSettings(
                run_seed=config.control.seed,
                max_model_len=config.rollout.max_model_len,
                max_new_tokens=config.rollout.max_new_tokens,
                vocab_size=None if config.model_arch is None else config.model_arch.vocab_size,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
            ),
        )
    )


def span_writer(
    config: RunConfig, directory: RunDirectory, run_id: RunId, *, node: NodeRank = LEADER
) -> SpanWriter:
    """The phase trace of a node's supervisor; one that writes nothing when traces are off."""
    tracing = config.tracing
    folder = Path(tracing.phase_trace_dir or directory.phase_trace)
    path = trace_path(folder, -1) if node == LEADER else node_trace_path(folder, node)
    return SpanWriter(
        path if tracing.phase_trace_enabled else None,
        rank=-1,
        run_id=run_id,
        role="control" if node == LEADER else f"node {node}",
        max_bytes=tracing.phase_trace_max_bytes,
        num_kept=tracing.phase_trace_keep,
    )


def load_exchange(
    scheduler: Scheduler,
    config: RunConfig,
    directory: RunDirectory,
    *,
    run_id: RunId,
    node: NodeRank | None,
    rng: Random,
) -> LoadExchange | None:
    """With the other schedulers of the servers; None when this is the only one.

    `node` is None in a run on one machine. Several nodes share the run directory, where the files
    lie when no other place is configured. Raises SiteError when they cannot be written.
    """
    scheduling = config.heterogeneous_rollout.scheduling
    place = scheduling.shared_load_dir
    if not place and node is None:
        return None
    path = Path(place) if place else directory.shared_load
    writer = f"{rng.getrandbits(64):016x}"
    # One supervisor is one scheduler: its run and node name it among all others.
    rank = f"{run_id}-{node or 0}"
    files = SharedDirectory(path, rank=rank, writer=writer)
    return LoadExchange(scheduler, files, scheduling, rank=rank, writer=writer)

"""Everything that is decided before the event loop starts: directory, identity, checks, plan."""

import glob
import re
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from libra import clock
from libra.config.availability import check_availability
from libra.config.load import LoadedConfig, dump_resolved, dump_yaml, load_resolved
from libra.config.problems import ConfigProblemsError
from libra.config.resume import check_resume
from libra.config.run import RunConfig
from libra.errors import ConfigError, InfeasiblePlanError, SiteError
from libra.ids import RunId
from libra.planner.applied import pinned_config, planned_config
from libra.planner.calibration import Calibration, encode
from libra.planner.matching import slots_of
from libra.planner.placement import spread_over_nodes
from libra.planner.plan import Plan
from libra.planner.probe import SwitchPlan
from libra.planner.report import PlanReport
from libra.planner.search import plan as planned
from libra.planner.train_layout import TrainLayout
from libra.storage.atomic import write_record
from libra.storage.checkpoints import list_complete_checkpoints
from libra_supervisor.app.recall import remembered_plan
from libra_supervisor.doctor.checks import LOOPBACK, check_site
from libra_supervisor.doctor.devices import (
    num_slots_here,
    resolved_device,
    slot_cores,
    slot_devices,
)
from libra_supervisor.doctor.findings import refusals, runs_in_the_way
from libra_supervisor.doctor.held import NOTHING, Held, held_by_run
from libra_supervisor.doctor.probes import port_finding
from libra_supervisor.loop.plan_memory import PlanMemory
from libra_supervisor.nodes.site import Site
from libra_supervisor.nodes.transport import leader_tls
from libra_supervisor.records.calibration import CalibrationStore, known_book, store_of
from libra_supervisor.run_directory import RunDirectory, holder_of

RUNS = Path("runs")


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    loaded: LoadedConfig
    config_path: Path
    environ: Mapping[str, str]
    run_directory: Path | None = None
    is_resume: bool = False
    site: Site | None = None
    """None: this machine alone."""

    node_token: str = ""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A run that may start."""

    config: RunConfig
    directory: RunDirectory
    plan: Plan
    given: RunConfig
    """As it was before the plan was written into it: what another plan starts from."""

    report: PlanReport
    book: Calibration | None
    """What the plan was made with; None when the configuration names no device."""

    store: CalibrationStore | None
    device: Literal["cpu", "cuda"]
    devices: tuple[str, ...]
    """By slot of the plan."""

    cores: tuple[tuple[int, ...], ...] = ()
    """By slot: cores beside its CUDA device; none leaves a process all."""

    environ: Mapping[str, str]
    loaded: LoadedConfig
    is_resume: bool
    site: Site | None = None
    node_token: str = ""
    """What the nodes of `site` share."""

    excluded: frozenset[TrainLayout] = frozenset()
    """Layouts that failed their recompute probe."""

    memory: PlanMemory | None = None
    """What an earlier supervisor left about the plan, which may change while the run goes on."""

    in_the_way: tuple[str, ...] = ()
    """Of a dry run: what other runs of this user have that this one would need."""


def choose_directory(request: RunRequest) -> RunDirectory:
    """The directory asked for; else a new one, or on --resume the newest of this configuration.

    Raises ConfigError when --resume finds no run, or when a directory already holds one and
    --resume was not given.
    """
    name = request.loaded.config.control.run_name or request.config_path.stem
    if request.run_directory is not None:
        directory = RunDirectory(request.run_directory.resolve())
        if directory.resolved_config_json.exists() and not request.is_resume:
            raise ConfigError(
                f"{directory.root} already holds a run; pass --resume to go on with it, or choose "
                "another --run-dir"
            )
        return directory
    if request.is_resume:
        return _newest_run(name)
    moment = datetime.fromtimestamp(clock.wall_ns() / 1e9, UTC)
    return RunDirectory((RUNS / f"{name}-{moment:%Y%m%dT%H%M%S}").resolve())


def prepare(request: RunRequest, directory: RunDirectory, *, writes: bool) -> Launch:
    """Check the machine and plan; with `writes`, into a directory that is held, record both.

    Without, the run is not about to start: what other runs of this user have is no hindrance.
    Raises ConfigError, InfeasiblePlanError or SiteError; nothing has been started then.
    """
    config = request.loaded.config
    if request.site is not None:
        cluster = config.cluster
        leader_tls(cluster.node_tls_cert, cluster.node_tls_key, cluster.node_tls_ca)
    device = resolved_device(config.control.device, request.environ)
    config = msgspec.structs.replace(
        config, control=msgspec.structs.replace(config.control, device=device)
    )
    memory: PlanMemory | None = None
    if request.is_resume and directory.resolved_config_json.exists():
        old, found = earlier_run(directory)
        config = pinned_config(config, old, changed=None if found is None else found.in_force)
        if config.global_resource_planner.runtime_dynamic_reconfiguration_enabled:
            memory = None if found is None else found.whole()
        if memory is not None:
            # What the run has come to, not what it was started with.
            config = planned_config(config, memory.in_force)
            old = planned_config(old, memory.in_force)
        changed = check_resume(old, config, place_of=request.loaded.place_of)
        if changed:
            raise ConfigProblemsError(changed, subject=str(request.config_path))
    given = config
    store = store_of(config, request.loaded.environment)
    book = known_book(config, store)
    report = planned(config, calibration=book)
    plan = _first_plan(report.plan, memory, config, request.site)
    config = planned_config(config, plan)
    launch = Launch(
        config=config,
        directory=directory,
        plan=plan,
        given=given,
        report=report,
        book=book,
        store=store,
        device=device,
        devices=(),
        environ=request.environ,
        loaded=request.loaded,
        is_resume=request.is_resume,
        site=request.site,
        node_token=request.node_token,
        memory=memory,
    )
    launch = _on_devices(launch, held=held_by_run(directory), is_trial=not writes)
    if writes:
        write_record(directory.given_config, request.config_path.read_bytes())
        write_plan(launch)
    return launch


def earlier_run(directory: RunDirectory) -> tuple[RunConfig, PlanMemory | None]:
    """The configuration that the run had, with every node there, and what it kept of its plan."""
    old = load_resolved(directory.resolved_config_json)
    memory = remembered_plan(directory)
    if memory is None or memory.home is None:
        return old, memory
    # The layout that it had on what was left is none that anybody asked for.
    return planned_config(old, memory.home), memory


def _first_plan(
    found: Plan, memory: PlanMemory | None, config: RunConfig, site: Site | None
) -> Plan:
    """What the run starts with: the plan it had come to, else the one that was found."""
    if memory is not None:
        least = config.global_resource_planner.min_rollout_gpus
        return memory.to_start_with(min_rollout_gpus=least)
    return found if site is None else on_nodes(found, config, site.num_nodes)


def on_nodes(plan: Plan, config: RunConfig, num_nodes: int) -> Plan:
    """The plan with a node for everything in it. Raises InfeasiblePlanError when it has no room.

    A plan of the search has them already; a configured one counts slots as if all were here.
    """
    if plan.strategy != "configured":
        return plan
    per_node = _gpus_per_node(config, len(slots_of(plan)), num_nodes)
    placed = spread_over_nodes(plan, gpus_per_node=per_node)
    if placed is None:
        raise InfeasiblePlanError(
            f"the configured split does not fit into nodes of {per_node} GPUs: every instance and "
            "every tensor-parallel group has to be inside one"
        )
    return placed


def _gpus_per_node(config: RunConfig, num_gpus: int, num_nodes: int) -> int:
    return config.hardware.gpus_per_node if config.hardware else -(-num_gpus // num_nodes)


def gpus_per_node(launch: Launch) -> int | None:
    """Slots of each node: as described, else its share of what is asked for; None on one node."""
    if launch.site is None:
        return None
    return _gpus_per_node(launch.loaded.config, num_gpus_of(launch), launch.site.num_nodes)


def on_plan(launch: Launch, plan: Plan) -> Launch:
    """The same run once `plan` is in force."""
    return msgspec.structs.replace(launch, config=planned_config(launch.given, plan), plan=plan)


def num_gpus_of(launch: Launch) -> int:
    """That plans are made for, whatever of it the plan in force leaves idle or lends to replicas.

    Of a resumed run too: what the configuration says, or what is in use if that is more.
    """
    config = launch.loaded.config
    in_use = launch.plan if launch.memory is None else launch.memory.plan
    is_ours = config.global_resource_planner.runtime_manage_rollout_processes
    # Servers of others are on devices that are none of ours.
    asked_for = config.training.train_gpus + (config.rollout.rollout_gpus if is_ours else 0)
    return max(asked_for, len(slots_of(in_use)))


def replanned(launch: Launch, switch: SwitchPlan) -> Launch:
    """The same run with the plan that its recompute probe led to; records it.

    Raises as `prepare` does.
    """
    plan = switch.report.plan
    if launch.site is not None:
        plan = on_nodes(plan, launch.given, launch.site.num_nodes)
    config = planned_config(launch.given, plan)
    changed = msgspec.structs.replace(
        launch,
        config=config,
        plan=plan,
        report=switch.report,
        book=switch.calibration,
        excluded=switch.excluded,
        memory=None,  # of a plan that did not fit
    )
    changed = _on_devices(changed, held=NOTHING)
    write_plan(changed)
    return changed


def _on_devices(launch: Launch, *, held: Held, is_trial: bool = False) -> Launch:
    """The launch with a device for each slot of its plan, which can be run here.

    `held` is what an earlier supervisor's processes of this run hold. A trial goes on where only
    other runs of this user are in the way.
    """
    beyond = check_availability(launch.config, launch.loaded.environment)
    if beyond:
        raise ConfigProblemsError(beyond, subject="the plan")
    plan, root = launch.plan, launch.directory.root
    num_slots = num_slots_of(launch)
    devices = slot_devices(launch.device, num_slots=num_slots, environ=launch.environ)
    site = launch.site
    host = LOOPBACK if site is None else site.own_host
    findings = check_site(launch.config, plan, launch.device, root, host=host, held=held)
    if site is not None:
        findings.append(port_finding(host, site.port, "the port for other nodes (node_port)"))
    in_the_way: tuple[str, ...] = ()
    if is_trial:
        holder = holder_of(launch.directory)
        here = () if holder is None else (f"{root} is in use by {holder}",)
        in_the_way = (*here, *runs_in_the_way(findings))
        findings = [it for it in findings if not it.is_in_use_by_a_run]
    if failed := refusals(findings):
        raise SiteError("\n".join(failed))
    cores = slot_cores(launch.device, devices)
    return msgspec.structs.replace(launch, devices=devices, cores=cores, in_the_way=in_the_way)


def num_slots_of(launch: Launch) -> int:
    """Slots that the plan of a launch or, where it may change, another one may use on this node."""
    num_used = _num_slots_in(launch.plan)
    if not launch.config.global_resource_planner.runtime_dynamic_reconfiguration_enabled:
        return num_used
    # What the plan does not use is spare, for another plan.
    found = max(num_used, num_slots_here(launch.device, launch.environ))
    if (per_node := gpus_per_node(launch)) is not None:
        # As on every other node; on CPU slots are what they are counted as.
        found = max(num_used, per_node if launch.device == "cpu" else min(found, per_node))
    if launch.device == "cuda" or launch.memory is None:
        return found
    # Slots share cores: what an earlier plan of the run had, or has lent, is still there.
    earlier = (launch.memory.plan, launch.memory.in_force)
    asked_for = num_gpus_of(launch) if launch.site is None else 0
    return max(found, asked_for, *map(_num_slots_in, earlier))


def _num_slots_in(plan: Plan) -> int:
    """On this node, up to the last one that is used."""
    return 1 + max((slot for node, slot in slots_of(plan) if not node), default=-1)


def new_run_id(directory: RunDirectory, wanted: str = "") -> RunId:
    return RunId(wanted or f"{directory.root.name}-{secrets.token_hex(2)}")


def _newest_run(name: str) -> RunDirectory:
    """The newest run of that name that got as far as a checkpoint, else the newest of all."""
    stamped = re.compile(re.escape(name) + r"-\d{8}T\d{6}")
    found = [
        RunDirectory(path.resolve())
        for path in sorted(RUNS.glob(f"{glob.escape(name)}-*"))
        if stamped.fullmatch(path.name) and (path / "config.resolved.json").exists()
    ]
    if not found:
        raise ConfigError(
            f"--resume: no run of {name} in {RUNS.resolve()}; name its --run-dir, or start anew "
            "without --resume"
        )
    saved = [run for run in found if list_complete_checkpoints(run.checkpoints)]
    return (saved or found)[-1]


def write_plan(launch: Launch) -> None:
    """Record what is going to run; the ranks read their configuration from here."""
    config, directory = launch.config, launch.directory
    write_record(directory.resolved_config, dump_yaml(config).encode())
    write_record(directory.resolved_config_json, dump_resolved(config))
    plan_json = msgspec.json.format(msgspec.json.encode(launch.plan))
    write_record(directory.plan, plan_json)
    if launch.book is not None:
        write_record(directory.calibration, encode(launch.book))

"""Verbs that look and start nothing: validate, plan, doctor, schema."""

import sys
from argparse import Namespace

import anyio
import msgspec

from libra.config.load import LoadedConfig, current_environ, load_config
from libra.config.run import RunConfig
from libra.planner.demand import observed_demand
from libra.planner.plan import Plan, places_in_words, plan_in_words
from libra.planner.render import render_plan
from libra.planner.search import plan as planned
from libra_supervisor.app.launch import RUNS, on_nodes
from libra_supervisor.app.scoring import check_reward
from libra_supervisor.doctor import probes
from libra_supervisor.doctor.checks import check_site
from libra_supervisor.doctor.devices import cpu_cores, cuda_devices, resolved_device
from libra_supervisor.doctor.findings import GIB, Finding
from libra_supervisor.doctor.leftovers import leftover_findings
from libra_supervisor.nodes.site import site_of
from libra_supervisor.process.kernel import Linux
from libra_supervisor.records.calibration import known_book, store_of
from libra_supervisor.records.reader import observed_lengths
from libra_supervisor.run_directory import RunDirectory
from libra_supervisor.validate import verb as validation
from libra_supervisor.validate.dataset import summarize_dataset
from libra_supervisor.validate.memory import estimate_memory
from libra_supervisor.validate.ports import DatasetSummary

ENVIRONMENT = 5


def validate(options: Namespace) -> int:
    request = validation.Request(
        path=options.config,
        overrides=tuple(options.overrides),
        environ=current_environ(),
        purpose=options.purpose,
        as_json=options.as_json,
    )

    def summarize(config: RunConfig) -> DatasetSummary:
        check_reward(config.data, request.environ)
        return summarize_dataset(config)

    summarized = summarize if options.data else None
    return _print(
        validation.validate(request, summarize_dataset=summarized, estimate_memory=estimate_memory)
    )


def schema(_options: Namespace) -> int:
    return _print(validation.schema())


def plan(options: Namespace) -> int:
    loaded = load_config(options.config, options.overrides, current_environ(), purpose="plan")
    book = known_book(loaded.config, store_of(loaded.config, loaded.environment))
    demand = None
    if options.lengths_of is not None:
        lengths = observed_lengths(RunDirectory(options.lengths_of))
        demand = observed_demand(loaded.config, lengths)
    report = planned(loaded.config, calibration=book, demand=demand)
    placed = _on_nodes(report.plan, loaded)
    report = msgspec.structs.replace(report, plan=placed)
    if options.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        words = f"{plan_in_words(placed)}\n{places_in_words(placed)}"
        sys.stdout.write(f"{words}{render_plan(report, book)}")
    return 0


def doctor(options: Namespace) -> int:
    environ = current_environ()
    if options.config is None:
        findings = probes.package_findings()
        memory = probes.available_memory_bytes()
        devices = cuda_devices(environ)
        findings += [
            Finding(check="memory", ok=True, detail=f"{memory / GIB:.1f} GiB available"),
            Finding(check="cores", ok=True, detail=", ".join(cpu_cores())),
            Finding(check="CUDA devices", ok=True, detail=", ".join(devices) or "none visible"),
        ]
    else:
        loaded = load_config(options.config, options.overrides, environ)
        config = loaded.config
        device = resolved_device(config.control.device, environ)
        book = known_book(config, store_of(config, loaded.environment))
        plan = _on_nodes(planned(config, calibration=book).plan, loaded)
        findings = check_site(config, plan, device, RUNS.resolve())
    findings += anyio.run(leftover_findings, Linux())
    if options.as_json:
        sys.stdout.write(msgspec.json.encode(findings).decode() + "\n")
    else:
        sys.stdout.writelines(_line(finding) for finding in findings)
    return 0 if all(finding.ok for finding in findings) else ENVIRONMENT


def _on_nodes(plan: Plan, loaded: LoadedConfig) -> Plan:
    """As a run would place it; which of the nodes this machine is makes no difference."""
    site = site_of(loaded.config.cluster, loaded.environment, node_rank=0)
    return plan if site is None else on_nodes(plan, loaded.config, site.num_nodes)


def _line(finding: Finding) -> str:
    mark = "ok  " if finding.ok else "FAIL"
    advice = f"\n       {finding.advice}" if finding.advice else ""
    return f"{mark} {finding.check}: {finding.detail}{advice}\n"


def _print(output: validation.Output) -> int:
    sys.stdout.write(output.stdout)
    sys.stderr.write(output.stderr)
    return output.exit_code

"""The command line's grammar. Imports nothing but argparse: --help has to be instant."""

import argparse
from pathlib import Path

from libra.version import __version__

_ON_TARGET = {
    "drain": "take a rollout instance, or all of a node, out of routing",
    "undrain": "route to a rollout instance, or to all of a node, again",
    "restart": "restart one rollout instance",
}
VERBS_ON_TARGET = tuple(_ON_TARGET)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="libra-supervisor",
        description="The control plane for RL post-training on bare metal.",
    )
    root.add_argument("--version", action="version", version=f"libra-rl {__version__}")
    verbs = root.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_run(verbs)
    _add_inspection(verbs)
    _add_score(verbs)
    _add_trace(verbs)
    _add_checkpoints(verbs)
    _add_control(verbs)
    return root


def _add_run(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = verbs.add_parser("run", help="run the main job")
    _add_config(run)
    _add_run_dir(run, "directory of the run (default: runs/<config>-<UTC time>)")
    run.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint of --run-dir, or of the newest run",
    )
    run.add_argument(
        "--node-rank",
        type=int,
        metavar="N",
        help="which of `nodes` this machine is, from 0 (default: Slurm's, or found by address)",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="check and plan everything, start nothing"
    )
    _add_log_level(run)


def _add_log_level(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level of events in logs/control.jsonl and on stderr; debug adds why each "
        "request went where it went (default: info)",
    )


def _add_checkpoints(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = verbs.add_parser("export", help="write a checkpoint's weights for Hugging Face")
    export.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_NNNNNN")
    export.add_argument("out", type=Path, help="a directory that is not there yet")
    fork = verbs.add_parser("fork", help="start a new run from the state of a checkpoint")
    fork.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_NNNNNN")
    _add_config(fork)
    _add_run_dir(fork, "directory of the new run (default: runs/<config>-<UTC time>)")
    _add_log_level(fork)
    fork.set_defaults(resume=False, dry_run=False)
    evaluate = verbs.add_parser("eval", help="evaluate a checkpoint on eval_data")
    evaluate.add_argument("checkpoint", type=Path, help="RUN/checkpoints/step_NNNNNN")
    _add_config(evaluate)
    _add_run_dir(evaluate, "directory of the evaluation's run (default: runs/<config>-<UTC time>)")
    _add_log_level(evaluate)
    _add_json(evaluate)
    evaluate.set_defaults(resume=False, dry_run=False)


def _add_inspection(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    validate = verbs.add_parser("validate", help="explain a configuration, or all its errors")
    _add_config(validate)
    validate.add_argument("--data", action="store_true", help="read the data and tokenizer too")
    validate.add_argument(
        "--for",
        dest="purpose",
        choices=("run", "plan"),
        default="run",
        help="plan: as plan and simulate take it, without the model, the data and what is not "
        "built yet (default: run)",
    )
    _add_json(validate)
    plan = verbs.add_parser("plan", help="show how the devices would be split")
    _add_config(plan)
    plan.add_argument(
        "--lengths-of",
        type=Path,
        metavar="RUN_DIR",
        help="plan for the lengths of that run's newest trajectories, not for the assumed ones",
    )
    _add_json(plan)
    _add_simulate(verbs)
    doctor = verbs.add_parser("doctor", help="check this machine, with what to do")
    doctor.add_argument("config", type=Path, nargs="?", help="check what this run needs as well")
    _add_overrides(doctor)
    _add_json(doctor)
    verbs.add_parser("schema", help="print the JSON Schema of configuration files")


def _add_simulate(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    simulate = verbs.add_parser(
        "simulate", help="run the planner and the scheduler on a virtual clock"
    )
    _add_config(simulate)
    simulate.add_argument("--steps", type=int, default=12, help="training steps (default: 12)")
    simulate.add_argument("--seed", type=int, default=1, help="of the lengths (default: 1)")
    simulate.add_argument(
        "--trace", type=Path, help="lengths from a JSONL file instead of the planner's prior"
    )
    simulate.add_argument(
        "--growth",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="how much longer responses get with every step, e.g. 0.02 (default: 0)",
    )
    simulate.add_argument(
        "--drift",
        type=Path,
        metavar="FILE",
        help="phases of lengths from a JSONL file: a plan that stays, one that follows, and the "
        "best in hindsight",
    )
    simulate.add_argument(
        "--compare", action="store_true", help="the same GPUs used in several ways"
    )
    _add_json(simulate)


def _add_score(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    score = verbs.add_parser("score", help="data and reward without engines, row by row")
    _add_config(score)
    score.add_argument(
        "--rows", type=_positive, default=20, metavar="N", help="rows to score (default: 20)"
    )
    score.add_argument(
        "--response-field",
        metavar="FIELD",
        help="field of a row that holds the response to score (default: the answer itself)",
    )
    _add_json(score)


def _add_trace(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    trace = verbs.add_parser("trace", help="phase traces for Perfetto or Chrome")
    trace.add_argument(
        "sources", nargs="+", type=Path, help="run directories or trace files, side by side"
    )
    trace.add_argument(
        "--output",
        type=Path,
        default=Path("phase_trace.json"),
        help="file to write (default: phase_trace.json)",
    )


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no node; they are numbers, from 0")
    return int(text)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _add_control(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = verbs.add_parser("status", help="show a running control plane's state")
    _add_run_dir(status, "directory of the run (default: the newest in runs/)")
    _add_json(status)
    status.add_argument("--watch", action="store_true", help="repeat until interrupted")
    stop = verbs.add_parser("stop", help="finish the step, save, stop")
    _add_run_dir(stop, "directory of the run (default: the newest in runs/)")
    stop.add_argument("--now", action="store_true", help="do not finish the step")
    reload = verbs.add_parser("reload", help="load the served weights into every engine once more")
    _add_run_dir(reload, "directory of the run (default: the newest in runs/)")
    _add_replan(verbs)
    _add_logs(verbs)
    for verb in VERBS_ON_TARGET:
        act = verbs.add_parser(verb, help=_ON_TARGET[verb])
        if verb == "restart":
            act.add_argument("target", help="the instance's name, e.g. vllm-0")
        else:
            whose = act.add_mutually_exclusive_group(required=True)
            whose.add_argument("target", nargs="?", default="", help="its name, e.g. vllm-0")
            whose.add_argument(
                "--node",
                type=_rank,
                metavar="N",
                help="every rollout instance on this node, counted from 0; trainer ranks stay",
            )
        _add_run_dir(act, "directory of the run (default: the newest in runs/)")


def _add_replan(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    replan = verbs.add_parser(
        "replan",
        help="look at the plan now, and change it if that pays; or go over to the plan named",
        description="Without the options of a plan the planner looks for one, and the change is "
        "made if it pays. With any of them the plan named is gone over to, whatever it earns; what "
        "is not named stays as it is.",
    )
    _add_run_dir(replan, "directory of the run (default: the newest in runs/)")
    replan.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and do nothing"
    )
    plan = replan.add_argument_group("the plan to go over to")
    plan.add_argument(
        "--train-gpus",
        type=_positive,
        metavar="N",
        help="of the core, without hybrid replicas; DP follows",
    )
    for size in ("tp", "pp", "cp", "ep"):
        plan.add_argument(
            f"--train-{size}-size", type=_positive, metavar="N", help=f"{size.upper()} of the core"
        )
    plan.add_argument(
        "--instances",
        type=_buckets,
        metavar="COUNTxTP[,...]",
        help="all rollout instances: 2x1,1x4 are two of TP 1 and one of TP 4; 0 is none",
    )
    plan.add_argument("--hybrids", type=_count, metavar="N", help="hybrid replicas")


def _buckets(text: str) -> list[tuple[int, int]]:
    if text == "0":
        return []
    found = [part.split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(it.isdecimal() and int(it) for it in pair) for pair in found):  # noqa: PLR2004 - a pair
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2x1,1x4 (count x TP)")
    return [(int(count), int(tp)) for count, tp in found]


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0")
    return number


def _add_logs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logs = verbs.add_parser("logs", help="what the children wrote, in order of time")
    _add_run_dir(logs, "directory of the run (default: the newest in runs/)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with lines to come")
    whose = logs.add_mutually_exclusive_group()
    whose.add_argument(
        "--child", action="append", default=[], help="of this child, e.g. vllm-0; may be repeated"
    )
    whose.add_argument("--role", choices=("rollout", "trainer"), help="of children of this kind")
    logs.add_argument("--rank", type=int, help="lines marked with this rank")
    logs.add_argument("--since", metavar="TIME", help="30s, 10m, 2h, 1d ago, or an ISO 8601 time")


def _add_config(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("config", type=Path, help="YAML file of the run")
    _add_overrides(verb)


def _add_overrides(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-o",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override an option (dotted path, YAML value); may be repeated",
    )


def _add_run_dir(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--run-dir", type=Path, help=text)


def _add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", dest="as_json", action="store_true", help="for programs")

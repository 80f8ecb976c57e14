"""Files, environment and overrides to one checked RunConfig. The only reader of files here."""

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import msgspec

from libra.config.availability import check_availability, check_stack, check_trackers
from libra.config.compose import compose, parse_override
from libra.config.document import MapNode, Node, Scalar
from libra.config.dump import dump_resolved, dump_yaml, parse_resolved
from libra.config.environment import (
    TRACE_DIRECTORY_VARIABLE,
    TRACE_VARIABLE,
    Environment,
    read_environment,
)
from libra.config.files import Files, check_model, check_paths, read_model_arch
from libra.config.problems import ConfigProblemsError, Place, Problem
from libra.config.rules import check_rules, check_warnings
from libra.config.rules.code import ShippedNames, check_names
from libra.config.run import RunConfig
from libra.config.typed import Typed, to_config
from libra.errors import ConfigError

__all__ = [
    "LoadedConfig",
    "Purpose",
    "ShippedNames",
    "current_environ",
    "dump_resolved",
    "dump_yaml",
    "load_config",
    "load_resolved",
]

MAX_FILE_BYTES: Final = 1 << 20
Purpose: TypeAlias = Literal["run", "plan"]
"""`run`: everything a run needs must be there, built and installed. `plan`: for arithmetic only
(plan, simulate); model and data need not be on this machine."""


class LoadedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that may be used, and where each value of it came from."""

    config: RunConfig
    place_of: Mapping[str, Place]
    """By dotted path of `libra.config.surface.all_options`; what is missing is a default."""

    warnings: tuple[Problem, ...]
    sources: tuple[str, ...]
    """Files that were read."""

    environment: Environment

    def origin_of(self, path: str) -> str:
        """`file:line`, `-o KEY=VALUE`, `environment NAME`, the model's config.json or `default`."""
        while path:
            if path in self.place_of:
                return str(self.place_of[path])
            path = path.rpartition(".")[0] if path.startswith("model_arch.") else ""
        return "default"


class Disk:
    """The real file system, with limits that no configuration reaches."""

    def read_text(self, path: Path) -> str:
        if not path.is_file():
            # A pipe or device would block or never end.
            raise FileNotFoundError(2, "no such file" if not path.exists() else "not a file", path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
        return path.read_bytes().decode("utf-8-sig")

    def directory_of(self, path: Path) -> str:
        try:
            return str(path.parent.resolve())
        except (OSError, RuntimeError):
            # Too long a name, or links in a circle; reading it will say so.
            return str(path.parent.absolute())

    def kind_of(self, path: Path) -> Literal["file", "directory", "missing"]:
        try:
            if path.is_dir():
                return "directory"
            return "file" if path.exists() else "missing"
        except OSError:
            return "missing"

    def names_in(self, directory: Path) -> tuple[str, ...]:
        try:
            return tuple(sorted(entry.name for entry in directory.iterdir()))
        except OSError:
            return ()


def current_environ() -> Mapping[str, str]:
    """Copy the process's environment variables; everybody else is handed what is read from them."""
    return dict(os.environ)  # noqa: TID251 - this is the one place


def load_config(
    path: Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
    *,
    purpose: Purpose = "run",
    shipped: ShippedNames | None = None,
) -> LoadedConfig:
    """Load and check the configuration of `path` under the environment under `overrides`.

    `shipped` are the names that `workflow` and `reward` may have besides module:function; without
    them only the form is checked.

    Raises ConfigProblemsError with everything that is wrong: in the files, in the overrides, in
    the environment, between options and, for a run, on disk.
    """
    disk = Disk()
    problems: list[Problem] = []
    environment = _read_environment(environ, problems)
    working_directory = _working_directory(problems)
    layers = []
    for text in overrides:
        layer, found = parse_override(text, working_directory)
        layers.append(layer)
        problems += found
    composed = compose(
        path,
        disk,
        environment=_layer_of(environment, working_directory),
        overrides=layers,
        home=environment.home,
    )
    typed = to_config(composed.tree, home=environment.home, is_whole=composed.is_whole)
    problems += (*composed.problems, *typed.problems)
    loaded = _complete(typed, composed.sources, environment, disk)
    if composed.is_whole:
        found_names = check_names(loaded.config, shipped) if shipped else ()
        cross = (*_cross_checks(loaded, disk, purpose), *found_names)
        problems += _located(cross, loaded, typed)
    if problems:
        raise ConfigProblemsError(_in_order(problems, composed.sources), subject=str(path))
    return loaded


def load_resolved(path: Path) -> RunConfig:
    """Read what `dump_resolved` wrote to `path`. Raises ConfigError when it is anything else."""
    try:
        return parse_resolved(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot use the resolved configuration {path}: {exc}") from exc


def _working_directory(problems: list[Problem]) -> str:
    try:
        return str(Path.cwd())
    except OSError as exc:
        what = f"the working directory cannot be used: {exc.strerror or exc}"
        problems.append(Problem(path="", what=what, hint="change to another one"))
        return "/"


def _read_environment(environ: Mapping[str, str], problems: list[Problem]) -> Environment:
    try:
        return read_environment(environ)
    except ConfigProblemsError as exc:
        problems += exc.problems
        return Environment()


def _layer_of(environment: Environment, working_directory: str) -> MapNode:
    """Options that environment variables set, as if a file had said them."""
    entries: dict[str | int, Node] = {}
    for option, variable, value in (
        ("phase_trace_enabled", TRACE_VARIABLE, environment.phase_trace),
        ("phase_trace_dir", TRACE_DIRECTORY_VARIABLE, environment.phase_trace_dir),
    ):
        if value is not None:
            place = Place(f"environment {variable}", None, working_directory)
            entries[option] = Scalar(value, place)
    return MapNode(entries, Place("environment", None, working_directory))


def _complete(
    typed: Typed, sources: tuple[str, ...], environment: Environment, files: Files
) -> LoadedConfig:
    """Fill in the model's own shape where nobody said one."""
    config, place_of = typed.config, dict(typed.place_of)
    if config.model_arch is None and "model_arch" not in place_of:
        found, _ = read_model_arch(config, files)
        if found is not None:
            config = msgspec.structs.replace(config, model_arch=found)
            place_of["model_arch"] = Place(f"{config.model.model_path}/config.json")
    warnings = (*typed.warnings, *_with_places(check_warnings(config), place_of))
    return LoadedConfig(
        config=config,
        place_of=place_of,
        warnings=warnings,
        sources=sources,
        environment=environment,
    )


def _cross_checks(loaded: LoadedConfig, files: Files, purpose: Purpose) -> tuple[Problem, ...]:
    config = loaded.config
    problems = check_rules(config)
    if purpose == "plan":
        return problems
    found, model_problems = read_model_arch(config, files)
    return (
        *problems,
        *check_availability(config, loaded.environment),
        *check_stack(config, has_transformer_engine=find_spec("transformer_engine") is not None),
        *check_trackers(config, missing=_missing(config.tracing.trackers)),
        *model_problems,
        *(check_model(config, found, files) if found else ()),
        *check_paths(config, files),
    )


def _missing(packages: Iterable[str]) -> tuple[str, ...]:
    """Those that cannot be imported; a mere directory of the name, such as W&B's, is no package."""
    specs = {name: find_spec(name) for name in packages}
    return tuple(name for name, spec in specs.items() if spec is None or spec.origin is None)


def _located(found: Iterable[Problem], loaded: LoadedConfig, typed: Typed) -> tuple[Problem, ...]:
    """Cross-field problems with their places, less those about options already reported."""
    broken = {_option(problem.path) for problem in typed.problems}
    return _with_places(
        (
            problem
            for problem in found
            if not broken.intersection(_option(path) for path in (problem.path, *problem.related))
        ),
        loaded.place_of,
    )


def _with_places(problems: Iterable[Problem], place_of: Mapping[str, Place]) -> tuple[Problem, ...]:
    """Each problem at its option, else at the first related option that somebody wrote."""
    return tuple(
        msgspec.structs.replace(problem, place=place)
        for problem in problems
        for place in [_place_for(problem, place_of)]
    )


def _place_for(problem: Problem, place_of: Mapping[str, Place]) -> Place | None:
    for path in (problem.path, *problem.related):
        for candidate in (path, _option(path), path.partition(".")[0]):
            if candidate in place_of:
                return place_of[candidate]
    return None


def _option(path: str) -> str:
    """`heterogeneous_rollout.instances[1].tp` -> `heterogeneous_rollout.instances`."""
    return path.partition("[")[0]


def _in_order(problems: Sequence[Problem], sources: Sequence[str]) -> tuple[Problem, ...]:
    """By file in reading order, then by line; what has no line last."""

    def key(problem: Problem) -> tuple[int, int]:
        place = problem.place
        if place is None or place.source not in sources:
            return len(sources), 0
        return sources.index(place.source), place.line or 0

    return tuple(sorted(dict.fromkeys(problems), key=key))

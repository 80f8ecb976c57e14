"""`python -m libra.serving.launch -- <arguments of vllm serve>`: one vLLM server, guarded.

The server is vLLM's own, run in this process with Libra's middleware and plug-in loaded. The
environment that must be set is listed in `libra.serving.identity`.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import anyio

from libra.errors import ConfigError, DataError, LibraError, SiteError
from libra.ids import RunId
from libra.serving.identity import (
    SERVED_DIRECTORY_VARIABLE,
    SERVED_MANIFEST_HASH_VARIABLE,
    SERVED_STAMPS_VARIABLE,
    SERVED_VERSION_VARIABLE,
    ServingIdentity,
    identity_from,
)
from libra.storage.arrival import when_visible
from libra.storage.manifests import read_manifest, verify_and_stamp
from libra.storage.receipt import digest_of
from libra.weights.manifest import WeightsManifest
from libra.wire.instance import GO_FILE_VARIABLE, WAITING_SUFFIX, FileStamp

MIDDLEWARE = "libra.serving.middleware.LibraMiddleware"
PLUGIN_NAME = "libra"
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_PATH = Path(__file__).parent / "plugin_path"
GO_POLL_S = 0.02
WARM_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.registry",
)

# The gate and the ledger live in the one API process, before the one engine.
SINGLE_PROCESS_FLAGS = frozenset(
    {"--api-server-count", "-asc", "--data-parallel-size", "-dp", "--headless", "--grpc"}
)
POLICY_FLAG = "--scheduling-policy"
EXTENSION_FLAG = "--worker-extension-cls"
EXTENSION = "libra.serving.worker.WorkerExtension"


def main(arguments: Sequence[str]) -> None:
    try:
        serve_arguments = prepare(arguments, os.environ)  # noqa: TID251 - the process's entry
    except LibraError as exc:
        sys.stderr.write(f"libra.serving.launch: {exc}\n")
        raise SystemExit(exc.exit_code) from exc
    sys.argv = ["vllm", "serve", *serve_arguments]
    from vllm.entrypoints.cli.main import main as vllm_main  # noqa: PLC0415 - env comes first

    if go_file := os.environ.get(GO_FILE_VARIABLE):  # noqa: TID251 - the process's entry
        warm_up()
        wait_for_go(Path(go_file))
    vllm_main()


def warm_up() -> None:
    """Import what a server needs before it looks at a device: most of its start without weights."""
    for name in WARM_MODULES:
        importlib.import_module(name)


def wait_for_go(go_file: Path, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Say that everything but the devices is there; return when they are given."""
    waiting = go_file.with_name(go_file.name + WAITING_SUFFIX)
    waiting.touch()
    while not go_file.exists():
        sleep(GO_POLL_S)
    waiting.unlink(missing_ok=True)
    go_file.unlink(missing_ok=True)


def prepare(arguments: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Check and complete the arguments; set what vLLM and the middleware read from `environment`.

    Raises ConfigError, DataError (the weights to serve are damaged) or SiteError.
    """
    if not arguments or arguments[0] != "--" or len(arguments) == 1:
        raise ConfigError("usage: python -m libra.serving.launch -- MODEL [vllm serve arguments]")
    given = list(arguments[1:])
    _check_flags(given)
    _describe_served(Path(given[0]), identity_from(environment), environment)
    # Routes for weight transfer exist only in this mode; the middleware guards them.
    environment["VLLM_SERVER_DEV_MODE"] = "1"
    # vLLM's front end in Rust would serve without the middleware.
    environment["VLLM_USE_RUST_FRONTEND"] = "0"
    _offer_plugin(environment)
    # The probe of a reload has the highest priority; among equals this is first come first served.
    ours = ("--middleware", MIDDLEWARE, POLICY_FLAG, "priority", EXTENSION_FLAG, EXTENSION)
    return [*given, *ours]


def _check_flags(arguments: Sequence[str]) -> None:
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    refused = sorted(flags & SINGLE_PROCESS_FLAGS)
    if refused:
        raise ConfigError(
            f"{', '.join(refused)} cannot be used: one API process before one engine keeps the "
            "version ledger; start more instances instead"
        )
    for flag, value in ((POLICY_FLAG, "priority"), (EXTENSION_FLAG, EXTENSION)):
        if flag in flags:
            raise ConfigError(f"{flag} cannot be used: Libra sets it to {value}")


def _describe_served(
    model: Path, identity: ServingIdentity, environment: MutableMapping[str, str]
) -> None:
    """Verify a directory among the run's weights as a version; any other is the base model."""
    directory = model.resolve()
    if not directory.is_relative_to(identity.weights_directory):
        environment[SERVED_VERSION_VARIABLE] = "0"
        for name in (
            SERVED_MANIFEST_HASH_VARIABLE, SERVED_DIRECTORY_VARIABLE, SERVED_STAMPS_VARIABLE
        ):  # fmt: skip
            environment.pop(name, None)
        return
    manifest, manifest_hash, stamps = anyio.run(_verified, directory, identity.run_id)
    environment[SERVED_VERSION_VARIABLE] = str(manifest.policy_version)
    environment[SERVED_MANIFEST_HASH_VARIABLE] = manifest_hash
    environment[SERVED_DIRECTORY_VARIABLE] = str(directory)
    environment[SERVED_STAMPS_VARIABLE] = digest_of(stamps)


async def _verified(
    directory: Path, run_id: RunId
) -> tuple[WeightsManifest, str, tuple[FileStamp, ...]]:
    manifest, manifest_hash = await when_visible(partial(read_manifest, directory))
    if manifest.run_id != run_id:
        raise DataError(f"{directory} was published by run {manifest.run_id}, not by {run_id}")
    stamps, _ = await when_visible(partial(verify_and_stamp, directory, manifest))
    return manifest, manifest_hash, stamps


def _offer_plugin(environment: MutableMapping[str, str]) -> None:
    """Make the plug-in's entry point visible here and, by PYTHONPATH, in every child."""
    sys.path.insert(0, str(PLUGIN_PATH))
    paths = [str(PLUGIN_PATH), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if PLUGIN_NAME not in {plugin.name for plugin in entry_points(group=PLUGIN_GROUP)}:
        raise SiteError(f"{PLUGIN_PATH} lacks the plug-in's metadata; reinstall libra-rl")
    if "VLLM_PLUGINS" in environment:
        environment["VLLM_PLUGINS"] += f",{PLUGIN_NAME}"


if __name__ == "__main__":
    main(sys.argv[1:])

"""Which server this is, told by the environment that the supervisor gives it."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from libra.errors import ConfigError
from libra.ids import Incarnation, InstanceId, PolicyVersion, RunId
from libra.wire.instance import (
    INCARNATION_VARIABLE,
    INSTANCE_ID_VARIABLE,
    RUN_ID_VARIABLE,
    TOKEN_FILE_VARIABLE,
    WEIGHTS_DIRECTORY_VARIABLE,
)

SERVED_VERSION_VARIABLE = "LIBRA_SERVED_VERSION"
SERVED_MANIFEST_HASH_VARIABLE = "LIBRA_SERVED_MANIFEST_HASH"
SERVED_DIRECTORY_VARIABLE = "LIBRA_SERVED_DIRECTORY"
SERVED_STAMPS_VARIABLE = "LIBRA_SERVED_STAMPS"
"""Set by `libra.serving.launch` for the middleware: what it verified before the engine loaded."""


class ServingIdentity(msgspec.Struct, frozen=True, kw_only=True):
    instance_id: InstanceId
    incarnation: Incarnation
    run_id: RunId
    weights_directory: Path
    """Every version that may be loaded lies in it; resolved."""

    token: str
    served_version: PolicyVersion = PolicyVersion(0)
    served_manifest_hash: str | None = None
    """Of the weights that the engine loads when it starts; None for the base model."""

    served_directory: Path | None = None
    served_stamps: str = ""
    """Digest of the stamps that its files had when they were verified."""


def identity_from(environment: Mapping[str, str]) -> ServingIdentity:
    """Read it. Raises ConfigError naming every missing variable, or the unusable token file."""
    required = (
        INSTANCE_ID_VARIABLE,
        INCARNATION_VARIABLE,
        RUN_ID_VARIABLE,
        WEIGHTS_DIRECTORY_VARIABLE,
        TOKEN_FILE_VARIABLE,
    )
    missing = [name for name in required if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} must be set: libra.serving.launch is started by the "
            "supervisor, or by hand with these variables"
        )
    return ServingIdentity(
        instance_id=InstanceId(environment[INSTANCE_ID_VARIABLE]),
        incarnation=Incarnation(environment[INCARNATION_VARIABLE]),
        run_id=RunId(environment[RUN_ID_VARIABLE]),
        weights_directory=Path(environment[WEIGHTS_DIRECTORY_VARIABLE]).resolve(),
        token=_token(Path(environment[TOKEN_FILE_VARIABLE])),
        served_version=PolicyVersion(int(environment.get(SERVED_VERSION_VARIABLE, "0"))),
        served_manifest_hash=environment.get(SERVED_MANIFEST_HASH_VARIABLE),
        served_directory=Path(served)
        if (served := environment.get(SERVED_DIRECTORY_VARIABLE))
        else None,
        served_stamps=environment.get(SERVED_STAMPS_VARIABLE, ""),
    )


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as exc:
        raise ConfigError(
            f"{TOKEN_FILE_VARIABLE} names {path}, which cannot be read: {exc.strerror}"
        ) from exc
    if not token:
        raise ConfigError(f"{TOKEN_FILE_VARIABLE} names {path}, which is empty")
    return token

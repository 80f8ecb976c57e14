"""The configuration that all nodes of a run share, by digests."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from libra.config.dump import dump_resolved, surface_of
from libra.config.nodes import NodesConfig
from libra.config.run import RunConfig
from libra.config.supervision import ApiConfig


def config_digest(config: RunConfig) -> str:
    """Names the configuration that all nodes of a run share."""
    return hashlib.sha256(dump_resolved(_shared(config))).hexdigest()[:16]


def option_digests(config: RunConfig) -> dict[str, str]:
    """The same by option, under the names that users write: values cannot be read from it."""
    found = _options(surface_of(_shared(config)), "")
    return {
        name: hashlib.sha256(json.dumps([name, value]).encode()).hexdigest()[:8]
        for name, value in found
    }


def _options(surface: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in surface.items():
        if isinstance(value, dict) and value:
            yield from _options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shared(config: RunConfig) -> RunConfig:
    """Where a node finds its secrets, and where it listens for people, is its own affair."""
    return msgspec.structs.replace(
        config,
        api=ApiConfig(),
        cluster=msgspec.structs.replace(
            config.cluster,
            **{
                name: getattr(NodesConfig(), name)
                for name in ("node_token_file", "node_tls_key", "node_tls_ca", "node_tls_cert")
            },
        ),
    )

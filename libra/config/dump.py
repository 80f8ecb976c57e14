"""RunConfig to text that loads back equal: JSON for child processes, YAML for people."""

import json
from typing import Any

import msgspec
import yaml

from libra.config.run import RunConfig
from libra.config.surface import FLAT_SECTIONS
from libra.config.wording import reads_as_itself


def dump_resolved(config: RunConfig) -> bytes:
    """JSON by section, for `libra.config.load.load_resolved`.

    An unbounded number is written as `Infinity`, which strict JSON parsers refuse: it keeps the
    round trip exact even inside workflow_args, where text and number could not be told apart.
    """
    return json.dumps(msgspec.to_builtins(config), ensure_ascii=True).encode()


def parse_resolved(data: bytes) -> RunConfig:
    """Inverse of `dump_resolved`. Raises ValueError when `data` is anything else."""
    return msgspec.convert(json.loads(data), RunConfig, str_keys=True)


def surface_of(config: RunConfig) -> dict[str, Any]:
    """Every option under the name and nesting that users write; absent sections left out."""
    surface: dict[str, Any] = {}
    for section, values in msgspec.to_builtins(config).items():
        if section in FLAT_SECTIONS:
            surface.update(values)
        elif values is not None:
            surface[section] = values
    return surface


def dump_yaml(config: RunConfig) -> str:
    """YAML in the form of a configuration file, every option written out."""
    return yaml.dump(
        surface_of(config),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=100,
    )


class _Dumper(yaml.SafeDumper):
    """Quotes text wherever this reader, not PyYAML's, could take it for something else."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # Single quotes lose NEL (U+0085) and its kind in PyYAML; double quotes escape all of them.
    style = None if text.isprintable() and (not text or reads_as_itself(text)) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)

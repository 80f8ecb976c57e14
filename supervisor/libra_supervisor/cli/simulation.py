"""The verb simulate: what a configuration would do, without a device."""

import sys
from argparse import Namespace

import msgspec

from libra.config.load import current_environ, load_config
from libra.config.run import RunConfig
from libra.simulate.comparison import compare
from libra.simulate.drift import read_drift
from libra.simulate.elastic import compare_drift
from libra.simulate.lengths import LengthSource, prior_lengths, read_trace
from libra.simulate.render import render_comparison, render_drift, render_simulation
from libra.simulate.run import simulate as simulated
from libra.simulate.scenarios import configured


def simulate(options: Namespace) -> int:
    loaded = load_config(options.config, options.overrides, current_environ(), purpose="plan")
    config = loaded.config
    if options.drift is not None:
        return _drift(options, config)
    lengths = _lengths(options, config)
    demand = lengths.demand(config)
    if options.compare:
        comparison = compare(config, demand, lengths, num_steps=options.steps, seed=options.seed)
        return _print(comparison, render_comparison(comparison), as_json=options.as_json)
    scenario = configured(config, demand)
    result = simulated(scenario, lengths, num_steps=options.steps, seed=options.seed)
    text = render_simulation(result, scenario.estimate)
    return _print(result, text, as_json=options.as_json)


def _drift(options: Namespace, config: RunConfig) -> int:
    lengths = read_drift(options.drift, config, seed=options.seed)
    comparison = compare_drift(config, lengths, num_steps=options.steps, seed=options.seed)
    return _print(comparison, render_drift(comparison), as_json=options.as_json)


def _lengths(options: Namespace, config: RunConfig) -> LengthSource:
    if options.trace is not None:
        return read_trace(options.trace, config)
    return prior_lengths(config, seed=options.seed, growth_per_step=options.growth)


def _print(result: msgspec.Struct, text: str, *, as_json: bool) -> int:
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(result)).decode() + "\n"
    sys.stdout.write(text)
    return 0

"""The verb score: what the reward function makes of the data, before any engine is started."""

import sys
from argparse import Namespace
from functools import partial
from statistics import fmean

import anyio
import msgspec

from libra.config.load import current_environ, load_config
from libra.errors import DataError, ungrouped
from libra_supervisor.app.scoring import ScoredRow, ScoreReport, score_rows
from libra_supervisor.validate.names import shipped_names

_SHOWN_CHARS = 40


def score(options: Namespace) -> int:
    """Print every scored row and the example prompt; DataError when a row has no reward."""
    environ = current_environ()
    config = load_config(options.config, options.overrides, environ, shipped=shipped_names()).config
    scored = partial(
        score_rows, config, environ, num_rows=options.rows, response_field=options.response_field
    )
    with ungrouped():
        report = anyio.run(scored, backend_options={"use_uvloop": True})
    if options.as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _lines(report))
    if report.num_failed:
        raise DataError(f"{report.num_failed} of {len(report.rows)} rows got no reward")
    return 0


def _lines(report: ScoreReport) -> list[str]:
    tokens = " ".join(repr(token) for token in report.example_tokens)
    lines = [
        f"the first prompt, {len(report.example_token_ids)} tokens: {tokens}",
        *(_line(row) for row in report.rows),
    ]
    rewards = [row.reward for row in report.rows if row.reward is not None]
    if rewards:
        lines.append(
            f"{len(rewards)} rewards: mean {fmean(rewards):.3f}, "
            f"min {min(rewards):g}, max {max(rewards):g}"
        )
    return lines


def _line(row: ScoredRow) -> str:
    outcome = f"failed: {row.failure}" if row.reward is None else f"{row.reward:.3f}"
    return f"{row.prompt_id}  {_short(row.prompt_text)} -> {_short(row.response_text)}  {outcome}"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}...")

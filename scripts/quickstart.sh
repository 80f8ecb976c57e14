#!/usr/bin/env bash
# From nothing to a trained model: set up, make the quickstart model and data, run the whole job.
# More arguments go to `libra-supervisor run`, e.g. scripts/quickstart.sh -o total_steps=20
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
[ -e .work/quickstart/complete ] || .venv/bin/python scripts/make_quickstart.py .work/quickstart
exec .venv/bin/libra-supervisor run configs/quickstart.yaml "$@"

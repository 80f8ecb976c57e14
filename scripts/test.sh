#!/usr/bin/env bash
# Set up, then every gate and test that CI runs. --long adds what takes too long for CI.
#   scripts/test.sh [--long]
set -euo pipefail
cd "$(dirname "$0")/.."
selection="not long"
[ "${1:-}" != --long ] || selection=""
scripts/setup.sh --test
scripts/check.sh
printf '== system tests\n'
export HF_HUB_OFFLINE=1
exec .venv/bin/pytest -q tests/system -m "$selection" --timeout 600

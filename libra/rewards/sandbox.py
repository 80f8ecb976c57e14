"""Programs that nobody has read, run in bubblewrap: no network, no files of the host, bounded.

Each program has namespaces of its own (processes, network, mounts; users too, unless we are root),
an empty /tmp in memory, an empty environment, and this interpreter with its packages, read-only.
When it is out of time, or who started it dies, all its processes die with it.
"""

import contextlib
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import which
from typing import IO, Final

import msgspec

from libra.errors import SiteError

MAIN: Final = Path(__file__).with_name("sandbox_main.py")
MAX_OUTPUT_BYTES: Final = 1 << 20
MAX_PROCESSES: Final = 32
TMP_BYTES: Final = 64 << 20
FIRST_UID: Final = 2_000_000_000
"""Root's programs run as a user that nobody is, one per caller: the kernel bounds the number of
processes by user, and root's not at all."""

_SYSTEM: Final = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_MADE: Final = frozenset({Path("/"), Path("/tmp")})  # noqa: S108 - inside
_ENVIRONMENT: Final = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",  # noqa: S108 - inside
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Outcome(msgspec.Struct, frozen=True):
    """How a program ended."""

    exit_code: int | None
    """None when it was out of time."""

    output: str
    """Its standard output, at most MAX_OUTPUT_BYTES; bytes that are no UTF-8 are replaced."""


def require_sandbox() -> None:
    """Raise SiteError where programs cannot be confined."""
    if which("bwrap") is None:
        raise SiteError(
            "programs run in bubblewrap, which is not installed: install the package bubblewrap"
        )
    with tempfile.TemporaryFile() as program:
        trial = subprocess.run(  # noqa: S603 - to see whether it is confined
            _command(program, with_checks=False, memory_bytes=1 << 30, cpu_s=5),
            pass_fds=(program.fileno(),),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    if trial.returncode:
        said = trial.stderr.decode(errors="replace").strip().splitlines()
        raise SiteError(
            f"bubblewrap cannot confine a program here: {said[-1] if said else trial.returncode}; "
            "are unprivileged user namespaces allowed?"
        )


def run_program(
    program: str, *, stdin: str, with_checks: bool, timeout_s: float, memory_bytes: int
) -> Outcome:
    """Run `program` once.

    Without checks it is run as `__main__` and may read `stdin`. With checks it is run as a module,
    and then the statements in `stdin`, in its namespace. `memory_bytes` bounds the address space of
    each of its processes.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
        source.write(program.encode(errors="replace"))
        source.seek(0)
        command = _command(
            source,
            with_checks=with_checks,
            memory_bytes=memory_bytes,
            cpu_s=math.ceil(timeout_s) + 1,
        )
        exit_code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            exit_code = subprocess.run(  # noqa: S603 - confined
                command,
                input=stdin.encode(errors="replace"),
                pass_fds=(source.fileno(),),
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
            ).returncode
        output.seek(0)
        return Outcome(exit_code, output.read(MAX_OUTPUT_BYTES).decode(errors="replace"))


def _command(
    program: IO[bytes], *, with_checks: bool, memory_bytes: int, cpu_s: int
) -> tuple[str, ...]:
    is_root = os.geteuid() == 0
    privileges = (
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL"),
        # What it takes to become another user; the first thing done there gives them up.
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
    )
    return (
        "bwrap",
        *(privileges if is_root else ("--unshare-all", "--cap-drop", "ALL")),
        *("--die-with-parent", "--new-session", "--clearenv"),
        *(part for pair in _ENVIRONMENT.items() for part in ("--setenv", *pair)),
        *("--proc", "/proc", "--dev", "/dev"),
        # Before the interpreter, which may itself lie below /tmp.
        *("--perms", "1777", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"),  # noqa: S108 - inside
        *_mounts(),
        *("--chdir", "/tmp"),  # noqa: S108 - inside
        *("--perms", "0444", "--ro-bind-data", str(program.fileno()), "/sandbox/program.py"),
        *(sys.executable, "-I", "-B", "/sandbox/main.py"),
        *(str(memory_bytes), str(cpu_s), str(MAX_OUTPUT_BYTES), str(MAX_PROCESSES)),
        str(FIRST_UID + os.getpid() if is_root else os.geteuid()),
        "checks" if with_checks else "main",
    )


def _mounts() -> tuple[str, ...]:
    """The system's programs and libraries, and this interpreter's where it lives elsewhere."""
    mounts: list[str] = []
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            mounts += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            mounts += _read_only(path, path)
    for prefix in sorted({sys.base_prefix, sys.prefix}):
        if not Path(prefix).is_relative_to("/usr"):
            mounts += _read_only(Path(prefix), Path(prefix))
    return (*mounts, *_read_only(MAIN, Path("/sandbox/main.py")))


def _read_only(source: Path, inside: Path) -> list[str]:
    # Directories that bubblewrap makes unasked are its own user's alone.
    above = [path for path in reversed(inside.parents) if path not in _MADE]
    return [
        *(part for path in above for part in ("--perms", "0755", "--dir", str(path))),
        *("--ro-bind", str(source), str(inside)),
    ]

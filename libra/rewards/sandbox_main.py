"""The first thing that runs inside the sandbox; it knows nothing but the standard library.

main.py MEMORY_BYTES CPU_S FILE_BYTES PROCESSES UID main|checks
"""

import os
import resource
import runpy
import sys


def main() -> None:
    memory_bytes, cpu_s, file_bytes, num_processes, uid = map(int, sys.argv[1:6])
    mode = sys.argv[6]
    if os.getuid() != uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    for kind, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NPROC, num_processes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(kind)
        bound = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (bound, bound))
    sys.argv = ["program.py"]
    if mode == "main":
        runpy.run_path("/sandbox/program.py", run_name="__main__")
        return
    namespace = runpy.run_path("/sandbox/program.py", run_name="program")
    # Read after the program is done: it must not find the word that says "passed" by chance.
    word, _, statements = sys.stdin.read().partition("\n")
    exec(compile(statements, "checks", "exec"), namespace)  # noqa: S102 - the row's own checks
    sys.stdout.write(f"\n{word}")


if __name__ == "__main__":
    main()

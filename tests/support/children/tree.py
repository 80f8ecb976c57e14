"""A process tree that is hard to end.

    tree.py WIDTH DEPTH [ignore] [setsid] [orphan] [bare]

Starts WIDTH children, each with DEPTH-1 levels below, then sleeps. `ignore`: ignores SIGTERM.
`setsid`: every process makes its own session. `orphan`: every child is started by a double fork,
so its parent is gone. `bare`: the environment is emptied. Prints its pid and those it knows of.
"""

import os
import signal
import subprocess
import sys
import time

width, depth, *modes = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
if "ignore" in modes:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth > 0:
    env = {} if "bare" in modes else None
    for _ in range(width):
        argv = [sys.executable, "-S", __file__, str(width), str(depth - 1), *modes]
        if "orphan" in modes:
            first = os.fork()
            if first == 0:
                subprocess.Popen(argv, env=env, start_new_session="setsid" in modes)
                os._exit(0)
            os.waitpid(first, 0)
        else:
            subprocess.Popen(argv, env=env, start_new_session="setsid" in modes)
print(os.getpid(), flush=True)
time.sleep(60)

"""What the plugin does to every process of a real vLLM."""

import os
import subprocess
import sys

from libra.serving.launch import PLUGIN_PATH

WAIT_ONCE = """
import os
from vllm.distributed import utils
from vllm.plugins import load_general_plugins

def refuse():
    raise SystemExit("it yields")

os.sched_yield = refuse
load_general_plugins()
utils.sched_yield()
"""


def test_processes_of_an_engine_on_shared_cores_wait_without_yielding():
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join((str(PLUGIN_PATH), *filter(None, sys.path)))
    argv = [sys.executable, "-c", WAIT_ONCE]
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]

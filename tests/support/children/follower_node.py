"""The real program of a follower, as `run` starts it on a node that does not lead.

    follower_node.py '{"hosts": [...], "port": P, "rank": R, "config": PATH, "run_dir": DIR}'

The secret comes in LIBRA_NODE_TOKEN.
"""

import json
import os
import sys
from pathlib import Path

import anyio

from libra.config.environment import read_environment
from libra.config.load import load_config
from libra_supervisor.app.following import Following, follow, node_directory
from libra_supervisor.nodes.site import Site
from libra_supervisor.nodes.token import node_token
from libra_supervisor.run_directory import RunDirectory, held

said = json.loads(sys.argv[1])
environ = dict(os.environ)
directory = RunDirectory(Path(said["run_dir"]))
own = node_directory(directory, said["rank"])
own.create()
following = Following(
    site=Site(hosts=tuple(said["hosts"]), port=said["port"], rank=said["rank"]),
    config=load_config(Path(said["config"]), purpose="plan").config,
    environ=environ,
    directory=directory,
    token=node_token("", read_environment(environ)),
    devices=(),
)
with held(own):
    outcome = anyio.run(follow, following, backend_options={"use_uvloop": True})
print(outcome.reason, flush=True)
sys.exit(outcome.exit_code)

"""`libra-supervisor` with every part of it real but vLLM and the trainer: small programs instead.

fake_run.py VERB ARGUMENTS...

SIGUSR2 stalls the event loop. With FAKE_RUN_TRAINER=real in the environment the trainer is real.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import msgspec

import wanted_plans
from libra_supervisor.app import builder, engine
from libra_supervisor.cli.main import program

HERE = Path(__file__).parent
server_spec = engine.server_spec


def fake_server_spec(config, placement, **rest):
    spec = server_spec(config, placement, **rest)
    served = rest.get("served_directory")
    argv = [sys.executable, str(HERE / "fake_server.py"), placement.host, str(placement.port)]
    return msgspec.structs.replace(spec, argv=(*argv, *([served] if served else [])))


def stall(_signum, _frame):
    time.sleep(600)


signal.signal(signal.SIGUSR2, stall)
wanted_plans.listen()
engine.server_spec = fake_server_spec
if os.environ.get("FAKE_RUN_TRAINER") != "real":
    builder.GangSite = partial(
        builder.GangSite,
        launcher=(sys.executable, str(HERE / "fake_torchrun.py")),
        program=(str(HERE / "fake_trainer.py"),),
    )
program()

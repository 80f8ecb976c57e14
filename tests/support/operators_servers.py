"""Fake servers as their operator starts them, for runs that only use them."""

import os
import signal
import socket
import subprocess
import sys

from processes import CHILDREN

RUN_ID = "others-1"


class OperatorsServer:
    """A fake server as its operator starts it, on an address that stays."""

    def __init__(self, folder, index, *, run_id=RUN_ID, host="127.0.0.1"):
        self.host = host
        with socket.socket() as probe:
            probe.bind((host, 0))
            self.port = probe.getsockname()[1]
        self.token_file = folder / "token"
        self.token_file.write_text("the operator's secret")
        self.token_file.chmod(0o600)
        self._folder, self._index, self._run_id = folder, index, run_id
        self._num_started = 0
        self.process = None

    @property
    def url(self):
        return f"http://{self.host}:{self.port}"

    def start(self):
        self._num_started += 1
        path = os.pathsep.join(map(str, (CHILDREN.parents[2], CHILDREN.parents[2] / "supervisor")))
        mine = {
            "PYTHONPATH": os.pathsep.join((path, str(CHILDREN.parent))),
            "LIBRA_INSTANCE_ID": f"vllm-{self._index}",
            "LIBRA_INCARNATION": f"life-{self._index}-{self._num_started}",
            "LIBRA_RUN_ID": self._run_id,
            "LIBRA_WEIGHTS_DIR": str(self._folder / "run" / "weights"),
            "LIBRA_TOKEN_FILE": str(self.token_file),
        }
        argv = [sys.executable, str(CHILDREN / "fake_server.py"), self.host, str(self.port)]
        self.process = subprocess.Popen(argv, env={**os.environ, **mine}, stdout=subprocess.DEVNULL)

    def stop(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

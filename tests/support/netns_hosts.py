"""Hosts on one machine: network namespaces with addresses of their own, joined by a bridge.

Host 0 is the machine itself. Each other host has its own processes too: what runs on it sees no
other pids, and all of it ends when its first process does, as when a machine loses its power.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from itertools import count as numbers
from pathlib import Path
from shutil import which

import psutil

from processes import CHILDREN

SETS = numbers()
"""The kernel takes links down after `ip` has returned: no set of hosts uses names or networks of
one before."""


def call(program, *words):
    subprocess.run([which(program), *words], check=True, capture_output=True)


def ip(*words):
    call("ip", *words)


class Hosts:
    """`addresses` by rank."""

    def __init__(self, count):
        number = next(SETS)
        self.key = f"{os.getpid()}x{number}"
        mixed = os.getpid() + 97 * number
        net = f"10.{100 + mixed % 100}.{mixed // 100 % 250}"
        self.addresses = [f"{net}.{rank + 1}" for rank in range(count)]
        self.processes = []
        self.at_end = []
        """Called when the processes have ended."""

        self.made = []
        """What to say to `ip` in the end."""

    def name(self, rank):
        return f"lbr{self.key}n{rank}"

    def link(self, rank):
        """The end of a host's cable that is on this machine."""
        return f"lbr{self.key}v{rank}"

    def make(self):
        bridge = f"lbr{self.key}br"
        ip("link", "add", bridge, "type", "bridge")
        self.made.append(("link", "del", bridge))
        ip("addr", "add", f"{self.addresses[0]}/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for rank, address in list(enumerate(self.addresses))[1:]:
            name, link = self.name(rank), self.link(rank)
            ip("netns", "add", name)
            self.made.append(("netns", "del", name))
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", link, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")

    def remove(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for end in self.at_end:
            end()
        for words in self.made:
            with suppress(subprocess.CalledProcessError):
                ip(*words)

    def cut(self, rank):
        ip("link", "set", self.link(rank), "down")

    def heal(self, rank):
        ip("link", "set", self.link(rank), "up")

    def worsen(self, rank):
        """Make the link narrow: a short queue that delays what it holds and drops the rest.

        Not every kernel has netem; a token bucket is everywhere.
        """
        bucket = ("tbf", "rate", "400kbit", "burst", "4kb", "latency", "60ms")
        for where in (("-n", self.name(rank), "eth0"), (self.link(rank),)):
            call("tc", *where[:-1], "qdisc", "add", "dev", where[-1], "root", *bucket)

    def run(self, rank, argv, *, log, env, has_own_sys=True):
        """Start a program on a host; its end is the end of everything there.

        With /sys of its own a host has no cgroups.
        """
        network = ("nsenter", f"--net=/run/netns/{self.name(rank)}")
        if has_own_sys:
            network = ("ip", "netns", "exec", self.name(rank))
        command = [
            *(network if rank else ()),
            *("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *argv,
        ]
        with log.open("ab") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
        self.processes.append(process)
        return process

    def fence(self):
        """Processes of this machine that see none of the other hosts': how to start one there.

        Without it host 0 sees what runs on all of them, and would end what it finds.
        """
        argv = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c"]
        # An init that lets nothing of what is orphaned stay a zombie.
        init = subprocess.Popen([*argv, "while :; do sleep 1; done"])
        self.processes.append(init)
        while not (first := psutil.Process(init.pid).children()):
            pass
        return ["nsenter", "-t", str(first[0].pid), "--pid", "--mount"]

    def children(self, process, word):
        """Below a process, those with the word in their command line."""
        return [
            it
            for it in psutil.Process(process.pid).children(recursive=True)
            if word in " ".join(command_of(it))
        ]

    def signal(self, process, signum):
        """To the first process on a host."""
        psutil.Process(process.pid).children()[0].send_signal(signum)

    def follow(self, rank, *, port, config, run_dir, token):
        said = {
            "hosts": self.addresses, "port": port, "rank": rank, "config": str(config),
            "run_dir": str(run_dir),
        }  # fmt: skip
        env = {
            **os.environ,
            "LIBRA_NODE_TOKEN": token,
            "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
        }
        argv = [sys.executable, str(CHILDREN / "follower_node.py"), json.dumps(said)]
        return self.run(rank, argv, log=run_dir / f"follower-{rank}.out", env=env)


def crash(process):
    """The host loses its power: SIGKILL of the first process there, and with it of all."""
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
        break
    process.wait()


def command_of(process):
    """Empty for one that ends while it is looked at."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextmanager
def hosts(count):
    made = Hosts(count)
    try:
        made.make()
        yield made
    finally:
        made.remove()

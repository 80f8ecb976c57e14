"""A Slurm of one node or of several hosts, real daemons, in a temporary folder.

`cred_expire` is how long a requeued job waits before it starts again: 120 s unless told otherwise,
5 s at least. To move its begin time forward instead kills the job: in the second of the requeue
slurmd still refuses it ("Job credential revoked").
"""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager
from itertools import count as numbers

CONFIG = """
ClusterName=t
SlurmctldHost={host}({address})
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=5
SchedulerParameters=sched_interval=2,sched_min_interval=100000,batch_sched_delay=1
{nodes}
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

CLUSTERS = numbers()


class Slurm:
    """Commands of a running cluster."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *argv, env=None):
        done = subprocess.run(
            argv, env={**self.env, **(env or {})}, capture_output=True, text=True, cwd=self.folder
        )
        if done.returncode:
            raise RuntimeError(f"{argv}: {done.stderr}{done.stdout}")
        return done.stdout

    def job(self, job_id):
        """The job's fields as `scontrol show job` prints them."""
        words = self.call("scontrol", "-o", "show", "job", str(job_id)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


@contextmanager
def slurm(folder, made=None):
    """Start munged, slurmctld and slurmd; end them by their pids.

    With `made` (`netns_hosts`) each of its hosts is a node: n0, n1, ... with addresses, processes
    and names of their own.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().split(".")[0]
    addresses = {host: "127.0.0.1"} if made is None else names_of(made)
    text = CONFIG.format(
        host=host,
        folder=folder,
        ports=free_ports(2),
        address=next(iter(addresses.values())),
        nodes="\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={os.cpu_count()} State=UNKNOWN"
            for name, address in addresses.items()
        ),
    )
    (folder / "slurm.conf").write_text(text)
    cluster, daemons = Slurm(folder), []
    try:
        daemons.append(start_munge(folder))
        wait_for((folder / "munge.socket").exists)
        daemons.append(start(cluster, ["slurmctld", "-D"], "slurmctld"))
        if made is None:
            daemons.append(start(cluster, ["slurmd", "-D", "-N", host], "slurmd"))
        else:
            start_on_hosts(cluster, made, addresses)
        wait_for(lambda: sinfo(cluster) == ["idle"] * len(addresses), what="idle nodes")
        yield cluster
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(20)


def start(cluster, argv, name):
    with (cluster.folder / f"{name}.out").open("wb") as log:
        return subprocess.Popen(argv, env=cluster.env, stdout=log, stderr=log)


def names_of(made):
    """Addresses by name. The names of no two sets of hosts are the same: stepds have sockets."""
    key = f"{os.getpid()}x{next(CLUSTERS)}"
    return {f"n{key}x{rank}": address for rank, address in enumerate(made.addresses)}


def start_on_hosts(cluster, made, addresses):
    """A slurmd on each host; what runs below one finds the others by their names."""
    known = cluster.folder / "hosts"
    lines = [f"{address} {name}\n" for name, address in addresses.items()]
    known.write_text("127.0.0.1 localhost\n" + "".join(lines))
    for rank, name in enumerate(addresses):
        script = f"mount --bind {known} /etc/hosts && hostname {name} && slurmd -D -N {name}; exit"
        argv = ["unshare", "--mount", "--uts", "sh", "-c", script]
        log = cluster.folder / f"slurmd-{rank}.out"
        # slurmd wants to see the kernel's cgroups.
        made.run(rank, argv, log=log, env=cluster.env, has_own_sys=False)


def start_munge(folder):
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    # munged wants a socket folder that others can reach and that is not writable by them.
    folder.chmod(0o755)
    argv = ["munged", "--foreground", "--force", f"--key-file={key}"]
    argv += [f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    argv += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def sinfo(cluster):
    try:
        return cluster.call("sinfo", "-h", "-N", "-o", "%t").split()
    except RuntimeError:
        return []


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for it in sockets:
        it.bind(("127.0.0.1", 0))
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports


def wait_for(condition, *, within_s=60, what="the condition"):
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {within_s} s")
        time.sleep(0.1)
    return value


def installed():
    return shutil.which("slurmctld") is not None

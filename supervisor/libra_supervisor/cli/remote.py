"""Verbs that talk to a running control plane over its Unix socket."""

import os
import sys
from argparse import Namespace
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from time import sleep

import msgspec

from libra.errors import PeerError, SiteError
from libra.wire.api import PlanOrder, StatusSnapshot, VerbReply, VerbRequest
from libra_supervisor.display.status import status_text
from libra_supervisor.process.peer import connect
from libra_supervisor.run_directory import RunDirectory, in_words, last_holder

RUNS = Path("runs")
TIMEOUT_S = 10.0
SEARCH_TIMEOUT_S = 120.0
"""A search over a thousand devices takes seconds, and may wait for one that is under way."""

WATCH_PERIOD_S = 1.0
MAX_SHOWN = 200
"""Bytes of an answer that makes no sense."""

REFUSED = 1


def speak(options: Namespace) -> int:
    directory = RunDirectory((options.run_dir or _newest()).resolve())
    if options.verb == "status":
        return _status(directory, options)
    request = VerbRequest(
        target=getattr(options, "target", ""),
        node=getattr(options, "node", None),
        now=getattr(options, "now", False),
        dry_run=getattr(options, "dry_run", False),
        plan=_order_in(options),
    )
    timeout_s = SEARCH_TIMEOUT_S if options.verb == "replan" else TIMEOUT_S
    content = msgspec.json.encode(request)
    body = _call(directory, "POST", f"/v1/{options.verb}", content, timeout_s=timeout_s)
    reply = _reply_in(body, directory)
    (sys.stdout if reply.ok else sys.stderr).write(f"{reply.message}\n")
    return 0 if reply.ok else REFUSED


def _reply_in(body: bytes, directory: RunDirectory) -> VerbReply:
    """Raises PeerError when it is none: the control plane ended over the request, say."""
    try:
        return msgspec.json.decode(body, type=VerbReply)
    except msgspec.DecodeError as error:
        said = body[:MAX_SHOWN].decode(errors="replace").strip()
        raise PeerError(
            f"the control plane of {directory.root} did not answer as it should: "
            f"{said or 'nothing'}; see its log"
        ) from error


def _order_in(options: Namespace) -> PlanOrder | None:
    """What `replan` names of a plan; None when it names nothing."""
    named = {name: getattr(options, name, None) for name in PlanOrder.__struct_fields__}
    if all(value is None for value in named.values()):
        return None
    if (instances := named["instances"]) is not None:
        named["instances"] = [{"count": count, "tp": tp} for count, tp in instances]
    return msgspec.convert(named, PlanOrder)


def _status(directory: RunDirectory, options: Namespace) -> int:
    while True:
        body = _call(directory, "GET", "/v1/status", b"")
        if options.as_json:
            sys.stdout.write(body.decode() + "\n")
        else:
            sys.stdout.write(status_text(msgspec.json.decode(body, type=StatusSnapshot)))
        sys.stdout.flush()
        if not options.watch:
            return 0
        sleep(WATCH_PERIOD_S)


def _newest() -> Path:
    """The newest run whose control plane listens. Raises SiteError when none does.

    One that was killed has left its socket.
    """
    for path in sorted(RUNS.glob("*/control.sock"), key=_changed_at, reverse=True):
        try:
            connect(path).close()
        except OSError:
            continue
        return path.parent
    raise SiteError(f"no running control plane in {RUNS.resolve()}; name its --run-dir")


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # its run has ended just now


def _call(
    directory: RunDirectory, method: str, path: str, body: bytes, *, timeout_s: float = TIMEOUT_S
) -> bytes:
    """One request. Raises SiteError when nobody listens or answers, PeerError for an odd answer."""
    connection = _UnixConnection(directory.root, timeout_s)
    try:
        connection.request(method, path, body=body or None)
        return connection.getresponse().read()
    except FileNotFoundError:
        raise SiteError(_nobody(directory)) from None
    except ConnectionRefusedError:
        # As on every machine but the leader's, where a shared run directory shows its socket.
        raise SiteError(f"{_nobody(directory)}{_elsewhere(directory)}") from None
    except TimeoutError:
        raise SiteError(
            f"the control plane of {directory.root} did not answer within {timeout_s:g} s: its "
            "process stands still (is it stopped, or does its machine swap?)"
        ) from None
    except (OSError, HTTPException) as error:
        raise PeerError(f"the control plane of {directory.root} did not answer: {error}") from error
    finally:
        connection.close()


def _nobody(directory: RunDirectory) -> str:
    return (
        f"no control plane is running in {directory.root} "
        f"({directory.control_socket.name} does not answer)"
    )


def _elsewhere(directory: RunDirectory) -> str:
    """Where to ask instead; empty when the run was last led from this machine."""
    holder = last_holder(directory)
    if holder is None or holder.host == os.uname().nodename:
        return ""
    return (
        f" on this machine, {os.uname().nodename}: the run was last led by {in_words(holder)}, "
        "where the same command gets its answer"
    )


class _UnixConnection(HTTPConnection):
    """HTTP over the run directory's socket, however long its path is."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        super().__init__("libra", timeout=timeout_s)
        self._root, self._timeout_s = root, timeout_s

    def connect(self) -> None:
        self.sock = connect(RunDirectory(self._root).control_socket)
        self.sock.settimeout(self._timeout_s)

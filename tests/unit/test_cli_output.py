import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

from config_files import write_run
from libra.errors import SiteError
from libra_supervisor.cli.main import main


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path, monkeypatch):
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown, encoding="ascii", errors="strict"))
    assert main(["validate", str(write_run(tmp_path, run_name="café"))]) == 0
    sys.stdout.flush()
    assert b"run_name: caf\\xe9" in shown.getvalue()


def test_a_full_disk_under_the_output_is_one_message(capfd, monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["schema"]) == SiteError.exit_code
        assert capfd.readouterr().err == (
            "libra-supervisor schema: writing failed: [Errno 28] No space left on device\n"
        )


HANGS = """
import asyncio, sys, threading, time
import anyio
from anyio import to_thread
from libra_supervisor.app.user_threads import abandon_user_threads
from libra_supervisor.cli import main

def hang():
    time.sleep(600)

async def impatient():
    with anyio.move_on_after(0.1):
        {wait}

async def run():
    abandon_user_threads()
    await impatient()

anyio.run(run, backend_options={{"use_uvloop": True}})
sys.argv = ["libra-supervisor", "schema"]
main()
"""


@pytest.mark.parametrize(
    "wait",
    ["await to_thread.run_sync(hang, abandon_on_cancel=True)", "await asyncio.to_thread(hang)"],
)
def test_a_thread_that_hangs_does_not_keep_the_process(wait):
    done = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", HANGS.format(wait=wait)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
    )
    assert done.stdout.rstrip().endswith("}")

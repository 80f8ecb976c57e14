import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

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

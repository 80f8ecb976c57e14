import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

from config_files import write_run
from libra_supervisor.cli.main import main


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path, monkeypatch):
    shown = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown, encoding="ascii", errors="strict"))
    assert main(["validate", str(write_run(tmp_path, run_name="café"))]) == 0
    sys.stdout.flush()
    assert b"run_name: caf\\xe9" in shown.getvalue()

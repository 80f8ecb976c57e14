import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory):
    """The quickstart's model and data, made as scripts/quickstart.sh makes them."""
    directory = tmp_path_factory.mktemp("quickstart") / "made"
    make = [sys.executable, str(ROOT / "scripts/make_quickstart.py"), str(directory)]
    subprocess.run(make, check=True, timeout=300, capture_output=True)
    return directory

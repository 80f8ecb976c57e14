"""What several scenarios of the nodes' link need."""

import subprocess
from shutil import which

import pytest


@pytest.fixture(scope="session")
def certificates(tmp_path_factory):
    """A certificate for localhost that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(  # noqa: S603 - our own words
        [
            which("openssl"), "req", "-x509",
            "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
            "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)

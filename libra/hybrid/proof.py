"""Both sides of a lane prove that they hold the run's key before either reads anything else.

    head   -> member   its nonce
    member -> head     its nonce, proof of the member
    head   -> member   proof of the head

A proof is an HMAC over both nonces and the side's name: what was heard on one connection is worth
nothing on another, and a proof sent back to its sender is that of the wrong side. Sans I/O but for
the key's file.
"""

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final, Literal, TypeAlias

from libra.errors import PeerError, SiteError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
ANSWER_BYTES: Final = NONCE_BYTES + PROOF_BYTES

Side: TypeAlias = Literal["head", "member"]


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(key: bytes, side: Side, *, head_nonce: bytes, member_nonce: bytes) -> bytes:
    """What `side` shows the other one on this connection."""
    said = b"libra lane 1\0" + side.encode() + b"\0" + head_nonce + member_nonce
    return hmac.new(key, said, hashlib.sha256).digest()


def check_proof(
    shown: bytes, key: bytes, side: Side, *, head_nonce: bytes, member_nonce: bytes
) -> None:
    """Raise PeerError unless `shown` is the proof of `side`."""
    wanted = proof(key, side, head_nonce=head_nonce, member_nonce=member_nonce)
    if not hmac.compare_digest(shown, wanted):
        raise PeerError(f"a {side} that does not hold the run's key")


def write_key(path: Path) -> None:
    """Make a new key that only this user can read. Raises FileExistsError when there is one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))


def read_key(path: Path) -> bytes:
    """Read a run's key. Raises SiteError when others could have read or written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise SiteError(f"the lanes' key {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise SiteError(f"the lanes' key {path} must be ours alone: chmod 600 {path}")
        key = file.read(KEY_BYTES + 1)
    if len(key) != KEY_BYTES:
        raise SiteError(f"the lanes' key {path} must have {KEY_BYTES} bytes")
    return key

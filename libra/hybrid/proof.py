"""Both sides of a lane prove that they hold the run's key before either reads anything else.

    head   -> member   its nonce
    member -> head     its nonce, proof of the member
    head   -> member   proof of the head

A proof is an HMAC over both nonces and the side's name: what was heard on one connection is worth
nothing on another, and a proof sent back to its sender is that of the wrong side. The key itself
comes with the supervisor's words, over the socket that each rank has to it. Sans I/O.
"""

import hashlib
import hmac
import secrets
from typing import Final, Literal, TypeAlias

from libra.errors import PeerError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
ANSWER_BYTES: Final = NONCE_BYTES + PROOF_BYTES

Side: TypeAlias = Literal["head", "member"]


def new_key() -> bytes:
    """Of a run; nobody is told it but its ranks."""
    return secrets.token_bytes(KEY_BYTES)


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

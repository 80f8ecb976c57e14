"""The bearer token of a request. Pure."""

import hashlib
import hmac


def has_bearer(header: str, token: str) -> bool:
    """Whether an Authorization header holds `token`, compared in constant time."""
    scheme, _, given = header.partition(" ")
    # A header may hold bytes that are no text; they come as surrogates.
    said = given.encode("utf-8", "surrogateescape")
    # Hashed first, so that not even the token's length shows in the time taken.
    is_equal = hmac.compare_digest(
        hashlib.sha256(said).digest(), hashlib.sha256(token.encode()).digest()
    )
    return scheme.lower() == "bearer" and is_equal

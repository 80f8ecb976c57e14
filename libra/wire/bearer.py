"""The bearer token of a request. Pure."""

import hmac


def has_bearer(header: str, token: str) -> bool:
    """Whether an Authorization header holds `token`, compared in constant time."""
    scheme, _, given = header.partition(" ")
    # A header may hold bytes that are no text; they come as surrogates.
    said = given.encode("utf-8", "surrogateescape")
    return scheme.lower() == "bearer" and hmac.compare_digest(said, token.encode())

"""The secret that the nodes of a run share. It comes by file or environment, never by argv."""

from pathlib import Path
from typing import Final

from libra.config.environment import NODE_TOKEN_VARIABLE, Environment
from libra.errors import SiteError
from libra.storage.secrecy import others_may_use

CREDENTIAL: Final = "node-token"
MIN_CHARACTERS: Final = 16


def node_token(path: str, environment: Environment) -> str:
    """From the file `path`, systemd's credential, or the environment; the first that is there.

    Raises SiteError when none is, when others may read the file, or when it is too short to be
    a secret. The message never holds the token.
    """
    credentials = environment.credentials_directory
    credential = None if credentials is None else Path(credentials, CREDENTIAL)
    if path:
        return _checked(_read(Path(path)), f"node_token_file {path}")
    if credential is not None and credential.exists():
        return _checked(_read(credential), f"the credential {CREDENTIAL}")
    if environment.node_token:
        return _checked(environment.node_token, NODE_TOKEN_VARIABLE)
    raise SiteError(
        "several nodes need a secret that they share: set node_token_file, pass the credential "
        f"{CREDENTIAL} (LoadCredential=) or the environment variable {NODE_TOKEN_VARIABLE}"
    )


def _read(path: Path) -> str:
    try:
        if others_may_use(path):
            raise SiteError(f"others may read the token file {path}; chmod 600 it")
        return path.read_text(encoding="ascii")
    except OSError as error:
        raise SiteError(f"the token file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SiteError(f"the token file {path} holds more than plain ASCII") from None


def _checked(text: str, whence: str) -> str:
    token = text.strip()
    if len(token) < MIN_CHARACTERS or not (token.isascii() and token.isprintable()):
        raise SiteError(
            f"the token of {whence} is no secret: {MIN_CHARACTERS} printable ASCII characters at "
            "least, for instance of: head -c 32 /dev/urandom | base64"
        )
    return token

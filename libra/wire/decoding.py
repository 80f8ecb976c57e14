"""What another process sent, as what it should be. Pure."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

import msgspec

from libra.errors import PeerError

T = TypeVar("T")


@overload
def decoded(message: bytes | bytearray, kind: type[T]) -> T: ...


@overload
def decoded(message: bytes | bytearray, kind: Any) -> Any: ...


def decoded(message: bytes | bytearray, kind: Any) -> Any:
    """The msgpack `message`. Raises PeerError, with the reason alone, when it is none of `kind`."""
    return _decoded(msgspec.msgpack.decode, message, kind)


def decoded_json(message: bytes | bytearray, kind: type[T]) -> T:
    """The JSON `message`. Raises PeerError, with the reason alone, when it is none of `kind`."""
    found: T = _decoded(msgspec.json.decode, message, kind)
    return found


def _decoded(decode: Callable[..., Any], message: bytes | bytearray, kind: Any) -> Any:
    try:
        return decode(message, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PeerError(str(error)) from error
    except RecursionError:
        # Even in fields that nobody asked for.
        raise PeerError("it is nested too deeply") from None

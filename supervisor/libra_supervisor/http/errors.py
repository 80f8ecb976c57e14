"""Why there is no answer. Callers turn these into errors that name the instance."""


class NotConnectedError(Exception):
    """The connection could not be made: the server has seen nothing of the request."""


class LostError(Exception):
    """The connection ended before the answer did, or what came was no HTTP."""

    is_stale = False
    """The connection had been used before and gave not one byte of an answer: it is likely that
    the server had closed it when the request was on its way."""

"""What holds for every test."""

import logging
import signal

import pytest
import structlog
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script. Children would inherit it, and not end on Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine, however slow it is: what CI says can be repeated. To look for
# new ones: pytest --hypothesis-profile=explore.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


@pytest.fixture
def own_logging():
    """What the test sets up of logging, in its own process, ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    structlog.reset_defaults()
    root.handlers, root.level = handlers, level

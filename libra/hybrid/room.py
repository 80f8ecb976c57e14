"""Memory for gradients that is there before a step needs it."""

import numpy as np

from libra.hybrid.checksum import Floats


def touched(count: int) -> Floats:
    """float32[count] of zeros, every page of it written.

    Whoever writes new memory first waits for each page, several times as long as a copy takes:
    that is to be a thread beside the step.
    """
    values = np.empty(count, np.float32)
    values.fill(0.0)
    return values

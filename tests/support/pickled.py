"""What a peer would send that wants its words run instead of read."""

import pickle
import sys


class _Run:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import sys; sys.was_unpickled = True",)


PICKLED = pickle.dumps(_Run())


def was_unpickled() -> bool:
    return hasattr(sys, "was_unpickled")

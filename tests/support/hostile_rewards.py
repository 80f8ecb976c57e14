"""Reward functions that misbehave; loaded by name in reward workers."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np


class ShylyError(Exception):
    def __str__(self):
        raise RuntimeError("I would rather not say")


def length(case):
    return len(case.response_text)


def by_name(case):
    """Does what the case's answer names, so that one worker meets every kind of misbehaviour."""
    return _ACTIONS[case.answer](case)


def _hangs(case):
    while True:
        pass


def _computes_for_ever(case):
    return 9**9**9


def _segfaults(case):
    return ctypes.string_at(0)


def _eats_memory(case):
    return len(bytearray(10 * 2**30))


def _exits(case):
    sys.exit(3)


def _exits_at_once(case):
    os._exit(4)


def _prints(case):
    for _ in range(20_000):
        sys.stdout.write("x" * 100 + "\n")
    return 0.5


def _speaks_in_halves(case):
    raise ValueError("half a character: \ud800")


def _does_not_say(case):
    raise ShylyError


def _leaves_a_child(case):
    child = subprocess.Popen(["/bin/sleep", "300"], start_new_session=True)
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    while True:
        time.sleep(1)


def _forks(case):
    return 0.5 if os.fork() else 0.75


def _closes_everything(case):
    os.closerange(3, 1000)
    return 0.5


def _dies_later(case):
    threading.Timer(0.2, os._exit, [5]).start()
    return 0.25


_ACTIONS = {
    "hangs": _hangs,
    "computes for ever": _computes_for_ever,
    "segfaults": _segfaults,
    "eats memory": _eats_memory,
    "exits": _exits,
    "exits at once": _exits_at_once,
    "prints": _prints,
    "leaves a child": _leaves_a_child,
    "dies later": _dies_later,
    "forks": _forks,
    "closes everything": _closes_everything,
    "raises": lambda case: 1 / 0,
    "speaks in halves": _speaks_in_halves,
    "does not say": _does_not_say,
    "returns a function": lambda case: lambda: 1.0,
    "returns nan": lambda case: float("nan"),
    "returns numpy": lambda case: np.float32(0.5),
    "scores": lambda case: 1.0,
}

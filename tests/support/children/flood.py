"""Prints a lot: flood.py KIND MEGABYTES. KIND: lines, one (a single line), bars (CR), binary."""

import os
import sys

kind, megabytes = sys.argv[1], float(sys.argv[2])
block = {
    "lines": (b"x" * 99 + b"\n") * 655,
    "one": b"y" * 65536,
    "bars": b"\r 50% |#####     |" * 3855,
    "binary": bytes(range(128, 256)) * 512,
}[kind]
for _ in range(round(megabytes * (1 << 20) / len(block))):
    os.write(1, block)
os.write(2, b"done\n")

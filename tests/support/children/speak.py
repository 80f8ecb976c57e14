"""Prints what it is told, then ends as it is told: speak.py TEXT REPEAT EXIT_CODE."""

import sys

text, repeat, code = sys.argv[1].encode().decode("unicode_escape"), sys.argv[2], sys.argv[3]
for _ in range(int(repeat)):
    sys.stdout.write(text)
sys.stdout.flush()
sys.stderr.write("last words\n")
sys.exit(int(code))

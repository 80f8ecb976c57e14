"""Write a data set of arithmetic questions with one right answer each.

    make_arithmetic.py OUT.jsonl [--rows N] [--seed N] [--largest N]

Each line has `prompt` (a question in one of a few wordings), `answer` (an integer as a string) and
`operation`. The same arguments give the same bytes everywhere; the file appears at once.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

WORDINGS = {
    "+": ("What is {a} + {b}?", "Add {a} and {b}.", "{a} plus {b} equals what?"),
    "-": ("What is {a} - {b}?", "Subtract {b} from {a}.", "{a} minus {b} equals what?"),
    "*": ("What is {a} * {b}?", "Multiply {a} by {b}.", "{a} times {b} equals what?"),
}
INSTRUCTION = " Answer with the number only."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--largest", type=int, default=20, help="largest number in a question")
    arguments = parser.parse_args()
    lines = rows(random.Random(arguments.seed), arguments.rows, arguments.largest)  # noqa: S311
    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.write_text("".join(json.dumps(row) + "\n" for row in lines))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"wrote {arguments.rows} rows to {out}")


def rows(rng: random.Random, num_rows: int, largest: int) -> Iterator[dict[str, str]]:
    """Questions whose answers are never negative."""
    for _ in range(num_rows):
        operation = rng.choice(list(WORDINGS))
        a, b = sorted((rng.randint(0, largest), rng.randint(0, largest)), reverse=True)
        question = rng.choice(WORDINGS[operation]).format(a=a, b=b)
        answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
        yield {"prompt": question + INSTRUCTION, "answer": str(answer), "operation": operation}


if __name__ == "__main__":
    main()

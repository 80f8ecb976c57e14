"""Programs that the policy writes, judged by running the row's tests on them."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from libra import clock
from libra.config.data import CODE_TIMEOUT_S
from libra.rewards.case import RewardCase
from libra.rewards.sandbox import run_program

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
TESTS_FIELD = "tests"


class Checks(msgspec.Struct, frozen=True):
    """Statements that run after the program, in its namespace; they pass unless they raise."""

    statements: str


class Dialogue(msgspec.Struct, frozen=True):
    """What the program is given to read, and what it must write; spaces at line ends aside."""

    given: str
    wanted: str


Test: TypeAlias = Checks | Dialogue


def code(
    case: RewardCase,
    *,
    timeout_s: float = CODE_TIMEOUT_S,
    memory_mb: int = 1024,
    partial: bool = False,
) -> float:
    """1 when the response's last code block passes all tests of the row, else 0.

    With `partial`, the share of tests that pass. The tests are the row's field `tests` or, without
    one, its answer: a string of statements, a list of such, a list of `{input, output}`, or
    `{inputs, outputs}` with lists. `timeout_s` is for all tests together; what was not run by then
    has not passed. Raises ValueError when the row has no tests that can be read.
    """
    tests = row_tests(case.extras.get(TESTS_FIELD, case.answer))
    program = program_in(case.response_text)
    ends_at = clock.monotonic() + timeout_s
    num_passed = 0
    for test in tests:
        left_s = ends_at - clock.monotonic()
        if left_s <= 0:
            break
        if _passes(program, test, timeout_s=left_s, memory_bytes=memory_mb << 20):
            num_passed += 1
        elif not partial:
            return 0.0
    return num_passed / len(tests) if partial else float(num_passed == len(tests))


def program_in(text: str) -> str:
    """The last fenced block, closed or not; the whole text when there is none."""
    blocks = _FENCE.findall(text)
    return str(blocks[-1]) if blocks else text


def row_tests(given: Any) -> list[Test]:
    """The tests in any of the forms of `code`. Raises ValueError."""
    tests = list(_tests(given))
    if not tests:
        raise ValueError("the row has no tests")
    return tests


def _tests(given: Any) -> Iterator[Test]:
    match given:
        case str() if given.strip():
            yield Checks(given)
        case {"input": str(read), "output": str(written)}:
            yield Dialogue(read, written)
        case {"inputs": Sequence() as reads, "outputs": Sequence() as writes} if len(reads) == len(
            writes
        ):
            for read, written in zip(reads, writes, strict=True):
                yield from _tests({"input": read, "output": written})
        case Mapping():
            raise ValueError(
                "a test is a string, {input, output} or {inputs, outputs} of equal length, not an "
                f"object with {', '.join(map(str, given)) or 'nothing'}"
            )
        case [*parts]:
            for part in parts:
                yield from _tests(part)
        case _:
            raise ValueError(f"a test cannot be {given!r:.60}")


def _passes(program: str, test: Test, *, timeout_s: float, memory_bytes: int) -> bool:
    if isinstance(test, Dialogue):
        outcome = run_program(
            program,
            stdin=test.given,
            with_checks=False,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
        )
        return outcome.exit_code == 0 and _lines(outcome.output) == _lines(test.wanted)
    # A program that ends the process early must not pass, so passing takes saying this word last.
    word = secrets.token_hex(16)
    outcome = run_program(
        program,
        stdin=f"{word}\n{test.statements}",
        with_checks=True,
        timeout_s=timeout_s,
        memory_bytes=memory_bytes,
    )
    return outcome.exit_code == 0 and outcome.output.endswith(f"\n{word}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]

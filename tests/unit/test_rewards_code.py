"""The reward `code`: which text is the program, which tests there are, what passes.

Programs really run here, in the sandbox.
"""

import contextlib
import os
import shutil
import socket
from pathlib import Path

import pytest

from libra import clock
from libra.config.data import DataConfig
from libra.config.model import ModelConfig
from libra.config.rules.code import code_reward_ends_first
from libra.config.run import RunConfig
from libra.errors import SiteError
from libra.rewards import sandbox
from libra.rewards.case import RewardCase
from libra.rewards.code import Checks, Dialogue, code, program_in, row_tests
from libra.rewards.loading import load_reward
from libra.rewards.sandbox import MAX_PROCESSES, run_program


def case(text, tests, *, answer=None):
    return RewardCase(
        prompt_id="row-0",
        prompt_text="",
        response_text=text,
        answer=answer,
        extras={} if tests is None else {"tests": tests},
        finish_reason="stop",
        num_response_tokens=1,
        num_turns=1,
    )


def answer(program):
    return f"Let me think.\n```python\n{program}\n```\nDone."


def score(text, tests, **arguments):
    """With time enough for a slow machine, unless a test is about time."""
    return code(case(text, tests), **{"timeout_s": 60.0} | arguments)


def run(program, *, timeout_s=60.0, stdin=""):
    return run_program(
        program, stdin=stdin, with_checks=False, timeout_s=timeout_s, memory_bytes=1 << 30
    )


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("a = 1", "a = 1"),
        ("```python\na = 1\n```", "a = 1\n"),
        ("```\na = 1\n``` better: ```py\nb = 2\n```", "b = 2\n"),
        ("```python\na = 1\nb =", "a = 1\nb ="),
    ],
)
def test_the_program_is_the_last_block_or_the_whole_text(text, program):
    assert program_in(text) == program


def test_tests_come_in_four_forms():
    assert row_tests("assert f()") == [Checks("assert f()")]
    assert row_tests(["assert f()", {"input": "1", "output": "2"}]) == [
        Checks("assert f()"),
        Dialogue("1", "2"),
    ]
    assert row_tests({"inputs": ["1", "3"], "outputs": ["2", "4"]}) == [
        Dialogue("1", "2"),
        Dialogue("3", "4"),
    ]


@pytest.mark.parametrize(
    "given",
    [None, "", " ", [], 5, [1], {}, {"input": 1, "output": "2"}, {"inputs": ["1"], "outputs": []}],
)
def test_a_row_without_readable_tests_is_an_error_and_no_wrong_answer(given):
    with pytest.raises(ValueError, match="test"):
        row_tests(given)


@pytest.mark.parametrize(
    ("program", "tests", "wanted"),
    [
        ("def double(n):\n    return 2 * n", "assert double(4) == 8", 1.0),
        ("def double(n):\n    return n", "assert double(4) == 8", 0.0),
        ("def double(n:", "assert double(4) == 8", 0.0),
        ("print(2 * int(input()))", [{"input": "4\n", "output": "8"}], 1.0),
        ("print(2 * int(input()), end=' \\n\\n')", [{"input": "4", "output": "8\n"}], 1.0),
        ("print(8)", {"inputs": ["4", "5"], "outputs": ["8", "10"]}, 0.0),
        ("print(8); raise SystemExit(3)", [{"input": "4", "output": "8"}], 0.0),
        # Where a program has a main part, a function's tests do not run it.
        ("def f(): return 1\nif __name__ == '__main__': input()", "assert f() == 1", 1.0),
    ],
)
def test_a_program_passes_when_all_its_tests_do(program, tests, wanted):
    assert score(answer(program), tests) == wanted


def test_the_answer_field_may_hold_the_tests():
    assert code(case(answer("x = 3"), None, answer="assert x == 3"), timeout_s=60.0) == 1.0


def test_partial_credit_is_the_share_of_tests_that_pass():
    tests = ["assert f(1) == 1", "assert f(2) == 1", "assert f(3) == 1", "assert f(3) == 3"]
    assert score(answer("def f(n): return n"), tests, partial=True) == 0.5


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import atexit, os; atexit.register(os._exit, 0)",
        "raise SystemExit",
        "import os; os.kill(os.getpid(), 9)",
        "print('passed')",
    ],
)
def test_ending_early_is_not_passing(program):
    assert score(answer(program), "assert False") == 0.0


@pytest.mark.case("T-B76")
@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os\nos.fork() or os.setsid()\nwhile True: pass",
        "while True: print('y' * 1000)",
    ],
)
def test_a_program_without_end_has_failed_in_time_and_leaves_nothing(program):
    memory_mb = 517 + os.getpid() % 100
    three = ["assert True"] * 3
    assert score(answer(program), three, timeout_s=1.0, memory_mb=memory_mb) == 0.0
    ends_at = clock.monotonic() + 20.0
    while is_running(memory_mb):
        assert clock.monotonic() < ends_at, "the program is still there"


@pytest.mark.case("T-B76")
def test_memory_processes_and_disk_are_bounded():
    assert score(answer("x = bytearray(3 << 30)"), "assert True") == 0.0
    forks = "import os, time\nfor n in range(200):\n    try: pid = os.fork()\n"
    forks += "    except OSError: break\n    if not pid: time.sleep(1); os._exit(0)\nprint(n)"
    assert 0 < int(run(forks).output) < MAX_PROCESSES
    filled = "for n in range(200): open(f'/tmp/{n}', 'wb').write(b'x' * 1000000)"
    assert run(filled).exit_code == 1


def test_nothing_of_the_host_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBRA_SECRET", "word")
    (tmp_path / "file").write_text("here")
    seen = run(
        "import os, sys\n"
        f"print(os.path.exists({str(tmp_path / 'file')!r}), 'LIBRA_SECRET' in os.environ)\n"
        "print(len([p for p in os.listdir('/proc') if p.isdigit()]) < 5, os.getuid() == 0)\n"
        "for name in ('/usr/x', '/sandbox/program.py', sys.prefix + '/x'):\n"
        "    try: open(name, 'a')\n"
        "    except OSError: print('kept out')\n"
    )
    assert seen.output.splitlines() == ["False False", "True False", *["kept out"] * 3]


def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
    assert outcome.exit_code == 1


def test_packages_of_the_run_are_there():
    assert run("import numpy; print(numpy.ones(3).sum())").output == "3.0\n"


def test_what_is_missing_is_said_before_the_first_sample(monkeypatch):
    assert load_reward("code", {"partial": True})
    monkeypatch.setattr(sandbox, "which", lambda _name: None)
    with pytest.raises(SiteError, match="install the package bubblewrap"):
        load_reward("code", {})


def test_a_host_that_does_not_let_us_confine_says_so(monkeypatch, tmp_path):
    stub = tmp_path / "bwrap"
    stub.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("bwrap") == str(stub)
    with pytest.raises(SiteError, match="No permissions to create new namespace"):
        load_reward("code", {})


def test_the_tests_end_before_the_reward_is_killed():
    def problems(**data):
        config = RunConfig(model=ModelConfig(model_path="/m"), data=DataConfig(**data))
        return [problem.path for problem in code_reward_ends_first(config)]

    assert problems(reward="code") == []
    assert problems(reward="code", reward_timeout_s=5.0) == ["reward_timeout_s"]
    assert problems(reward="code", reward_args={"timeout_s": 9}) == ["reward_timeout_s"]
    assert problems(reward="math", reward_args={"timeout_s": 9}) == []


def is_running(memory_mb):
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"/sandbox/main.py" in words and str(memory_mb << 20).encode() in words:
                return True
    return False

import os

import pytest

from libra_supervisor.process.cgroup import _cgroup2_mount, _own_group
from libra_supervisor.process.identity import (
    ProcessIdentity,
    identity_of,
    is_running,
    parse_stat,
)
from libra_supervisor.process.kernel import own_line, read_table
from libra_supervisor.process.spec import ProcessSpec, environment_of


def test_a_name_with_spaces_and_brackets_does_not_shift_the_fields():
    text = b"42 (a) R 1 (x) S 7 41 40 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 12345 0 0"
    row = parse_stat(text)
    assert (row.pid, row.name, row.state, row.ppid) == (42, "a) R 1 (x", "S", 7)
    assert (row.pgid, row.sid, row.start_ticks) == (41, 40, 12345)


@pytest.mark.case("R-B73")
def test_only_pid_start_time_and_boot_together_are_an_identity():
    me = identity_of(os.getpid())
    assert me is not None
    assert is_running(me)
    assert not is_running(ProcessIdentity(me.pid, me.start_ticks + 1, me.boot_id))
    assert not is_running(ProcessIdentity(me.pid, me.start_ticks, "another boot"))
    assert identity_of(2**22 + 1) is None


def test_this_process_and_its_ancestors_are_protected():
    line = own_line(read_table())
    assert {1, os.getpid(), os.getppid()} <= line


def test_the_cgroup_is_found_on_hybrid_and_pure_hosts():
    hybrid = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    assert _cgroup2_mount(hybrid) == "/sys/fs/cgroup/unified"
    assert _cgroup2_mount("proc /proc proc rw 0 0\n") is None
    assert _own_group("4:memory:/a\n0::/system.slice/x.service\n") == "/system.slice/x.service"
    assert _own_group("4:memory:/a\n") is None


@pytest.mark.case("R-B78", "R-B36")
def test_children_never_see_what_is_the_supervisors_alone():
    spec = ProcessSpec(
        child_id="c",
        run_id="r",
        argv=("x",),
        env={"NOTIFY_SOCKET": "/n", "JOURNAL_STREAM": "1:2", "No_Proxy": "h", "A": "1"},
        cwd="/",
        log_path="/l",
    )
    assert environment_of(spec) == {
        "A": "1",
        "LIBRA_RUN_ID": "r",
        "LIBRA_CHILD_ID": "c",
        "SPT_NOENV": "1",
    }

import os

import pytest

from libra.errors import DataError, SiteError
from libra.ids import ChildId, Incarnation, RunId
from libra_supervisor.events import ChildReady
from libra_supervisor.journal import (
    ChildRecord,
    Journal,
    StateFile,
    SupervisorState,
    read_journal,
)

STATE = SupervisorState(
    run_id=RunId("r"),
    written_at_ns=5,
    supervisor_pid=7,
    children=(
        ChildRecord(
            child_id=ChildId("vllm-0"),
            incarnation=Incarnation("vllm-0-a"),
            pid=9,
            start_ticks=100,
            boot_id="b",
            facts={"url": "http://127.0.0.1:8000"},
        ),
    ),
    facts={"step": 3},
)


def test_what_is_saved_is_loaded(tmp_path):
    file = StateFile(tmp_path / "state.json")
    assert file.load() is None
    file.save(STATE)
    assert file.load() == STATE
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_state_of_a_newer_libra_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"schema_version": 99, "unknown": true}')
    with pytest.raises(DataError, match=r"schema version 99.*use the Libra that wrote it"):
        StateFile(path).load()


def test_a_file_that_is_no_state_is_refused_by_name(tmp_path):
    path = tmp_path / "state.json"
    path.write_text("{")
    with pytest.raises(DataError, match=r"state\.json is not a state of this program"):
        StateFile(path).load()


def test_a_disk_that_refuses_leaves_the_old_state(tmp_path):
    file = StateFile(tmp_path / "state.json")
    file.save(STATE)
    broken = StateFile(tmp_path / "missing" / "state.json")
    with pytest.raises(SiteError, match="cannot write"):
        broken.save(STATE)
    assert file.load() == STATE


def test_the_journal_grows_and_survives_a_torn_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append("sigterm_sent", child_id="vllm-0")
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"at_ns": 1, "na')
    journal = Journal(path)
    journal.append_struct(ChildReady(ChildId("vllm-0"), Incarnation("i"), 2.5, 9.0))
    journal.close()
    entries = [dict(entry) for entry in read_journal(path)]
    assert [entry["name"] for entry in entries] == ["sigterm_sent", "ChildReady"]
    assert entries[1]["start_s"] == 2.5
    assert isinstance(entries[0]["at_ns"], int)


def test_a_full_disk_costs_entries_and_is_counted(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal._fd = os.open("/dev/full", os.O_WRONLY)
    journal.append("x")
    journal.close()
    assert journal.num_lost == 1

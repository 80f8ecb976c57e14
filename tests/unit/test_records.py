import json
import os

import msgspec
import pytest

from control_parts import METRICS, trajectory
from libra.config.model import ModelConfig
from libra.config.run import RunConfig
from libra.errors import DataError, SiteError
from libra.ids import InstanceId, PolicyVersion, PromptId
from libra.planner.plan import configured_plan
from libra.rollouts.evaluation import Evaluation, EvaluationTerms
from libra.rollouts.group import AdmittedGroup, CompleteGroup, PromptRef
from libra.storage.atomic import partial_sibling
from libra_supervisor.cli.run import said
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.step_book import StepBook
from libra_supervisor.records.evaluation import EvaluationRecord
from libra_supervisor.records.reader import last_attempt, last_decision_id, last_evaluation
from libra_supervisor.records.reconfiguration import DecisionRecord, Line, ReconfigurationRecord
from libra_supervisor.records.writer import RecordsWriter, append_line
from libra_supervisor.run_directory import RunDirectory


def group(row: int, rewards) -> CompleteGroup:
    admitted = AdmittedGroup(PromptRef(PromptId(f"p{row}"), row, 0), 0, len(rewards))
    made = [trajectory(admitted, i, PolicyVersion(4), r) for i, r in enumerate(rewards)]
    return CompleteGroup(admitted, tuple(made))


def at(now: float) -> Moment:
    return Moment(now, int(now * 1e9))


def closed_step(book: StepBook):
    book.on_collect(at(10.0))
    book.on_batch_taken(6, (group(0, (1.0, 0.0)), group(1, (1.0, 1.0))), PolicyVersion(5), at(12.0))
    book.on_reload_begun(at(11.0))
    book.on_trained(METRICS)
    book.on_phase(is_settling=True, at=at(13.0))
    book.on_reloaded(at(13.5))
    book.on_phase(is_settling=False, at=at(13.5))
    book.on_exported(0.25)
    return book.close(attempt=2, num_dropped={"stale": 8}, at=at(14.0))


def test_a_step_s_line_has_the_batch_the_update_and_where_the_time_went():
    (command,) = closed_step(StepBook())
    record = command.record
    assert (record.step, record.policy_version, record.attempt) == (6, 6, 2)
    assert (record.reward_mean, record.frac_zero_std) == (0.75, 0.5)
    assert (record.staleness_mean, record.staleness_max) == (1.0, 1)
    assert (record.rollout_wait_s, record.export_s) == (2.0, 0.25)
    assert (record.reload_s, record.publish_wait_s) == (2.5, 0.5)
    assert record.step_s == 4.0
    # Two sampled tokens in each of four trajectories, over four seconds.
    assert record.tokens_per_s == 2.0
    assert record.num_dropped == {"stale": 8}


def say_of_steps(book: StepBook, *steps):
    """What is said of each step, whose only group has the given rewards."""
    spoken = []
    for step, rewards in enumerate(steps, start=1):
        book.on_batch_taken(step, (group(0, rewards),), PolicyVersion(5), at(step))
        book.on_trained(METRICS)
        _, *said_of = book.close(attempt=0, num_dropped={}, at=at(step + 0.5))
        spoken.append([s.event for s in said_of if s.is_warning])
    return spoken


@pytest.mark.case("T-B22")
def test_that_nothing_is_learned_is_said_once_after_three_steps_without_an_advantage():
    flat, good = (1.0, 1.0), (0.0, 1.0)
    spoken = say_of_steps(StepBook(), flat, flat, good, flat, flat, flat, flat, flat)
    assert spoken == [[], [], [], [], [], ["nothing_to_learn"], [], []]
    again = say_of_steps(StepBook(), flat, flat, flat, good, flat, flat, flat)
    assert [bool(said_of) for said_of in again] == [False, False, True, *[False] * 3, True]


@pytest.mark.case("T-B14")
@pytest.mark.parametrize(
    ("num_tokens", "why"),
    [(0, "every answer was cut off and is masked"), (8, "a loss or gradient norm was not finite")],
)
def test_a_step_whose_weights_stayed_as_they_were_is_said(num_tokens, why):
    book = StepBook()
    book.on_batch_taken(6, (group(0, (1.0, 0.0)),), PolicyVersion(5), at(12.0))
    skipped = {"num_optimizer_steps": 0, "num_skipped_steps": 1, "num_tokens": num_tokens}
    book.on_trained(msgspec.structs.replace(METRICS, **skipped))
    _, said_of = book.close(attempt=0, num_dropped={}, at=at(14.0))
    assert (said_of.event, said_of.is_warning) == ("optimizer_steps_skipped", True)
    assert (said_of.fields["step"], said_of.fields["num_skipped"]) == (6, 1)
    assert why in said_of.fields["why"]


def test_a_reload_counts_for_the_step_in_which_it_was_settled_and_for_no_other():
    book = StepBook()
    book.on_reload_begun(at(9.0))
    book.on_collect(at(9.5))
    book.on_reloaded(at(11.0))
    (first,) = closed_step(book)
    book.on_collect(at(14.0))
    book.on_batch_taken(7, (group(0, (1.0, 0.0)),), PolicyVersion(6), at(15.0))
    book.on_trained(METRICS)
    (second,) = book.close(attempt=2, num_dropped={}, at=at(16.0))
    assert first.record.reload_s == 2.5
    assert (second.record.reload_s, second.record.publish_wait_s) == (0.0, 0.0)


def test_a_trainer_that_holds_its_weights_waits_for_the_rest_of_the_publication():
    book = StepBook()
    book.on_collect(at(10.0))
    book.on_batch_taken(6, (group(0, (1.0, 0.0)),), PolicyVersion(5), at(11.0))
    book.on_trained(METRICS)
    book.on_reload_begun(at(12.0))
    book.on_exported(0.5)
    book.on_reloaded(at(13.0), is_held=True)
    (command,) = book.close(attempt=1, num_dropped={}, at=at(13.0))
    record = command.record
    assert (record.export_s, record.publish_wait_s, record.reload_s) == (0.5, 0.5, 1.0)


def test_a_step_is_written_once_and_one_whose_gang_was_lost_never():
    book = StepBook()
    closed_step(book)
    assert book.close(attempt=2, num_dropped={}, at=at(15.0)) == ()
    book.on_collect(at(20.0))
    book.on_batch_taken(7, (group(0, (1.0, 0.0)),), PolicyVersion(6), at(21.0))
    book.discard()
    assert book.close(attempt=3, num_dropped={}, at=at(22.0)) == ()
    assert book.num_closed == 1


def test_trajectories_and_metrics_of_a_step_are_lines_that_programs_can_read(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    (command,) = closed_step(StepBook())
    RecordsWriter(directory).write_step(command.record, command.groups)
    (line,) = directory.metrics.read_text().splitlines()
    assert json.loads(line)["step"] == 6
    written = [json.loads(x) for x in directory.trajectories_of(6).read_text().splitlines()]
    assert [t["reward"] for t in written] == [1.0, 0.0, 1.0, 1.0]
    assert written[0]["version_spans"] == [[4, 1, 3]]
    assert written[0]["oldest_version"] == 4


def evaluated():
    terms = EvaluationTerms(
        rows=(0, 1), num_samples=1, max_concurrent=4, max_attempts=1, pass_reward=1.0
    )
    evaluation = Evaluation(terms, PolicyVersion(4))
    for admitted, reward in zip(evaluation.admit(), (1.0, 0.0), strict=True):
        evaluation.on_finished(trajectory(admitted, 0, PolicyVersion(4), reward))
    record = EvaluationRecord(
        policy_version=PolicyVersion(4),
        attempt=2,
        wall_time_ns=1,
        eval_s=0.5,
        summary=evaluation.summary(),
    )
    return record, evaluation.trajectories


def test_an_evaluation_is_a_line_and_a_file_of_its_trajectories(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    record, trajectories = evaluated()
    RecordsWriter(directory).write_evaluation(record, trajectories)
    newer = msgspec.structs.replace(record, policy_version=PolicyVersion(6))
    (line,) = directory.evaluations.read_text().splitlines()
    RecordsWriter(directory).write_evaluation(newer, trajectories)
    assert last_evaluation(directory.evaluations) == newer
    assert said(newer) == (
        "v6: avg@1 0.5000, pass@1 0.5000\n"
        "2 rows, 2 trajectories, 0 failed; 2.0 tokens, 0.0% truncated; 0.5 s\n"
    )
    read = json.loads(line)
    assert (read["policy_version"], read["attempt"]) == (4, 2)
    assert read["summary"]["reward_mean"] == 0.5
    assert read["summary"]["pass_at"] == {"1": 0.5}
    written = [json.loads(x) for x in directory.evaluated_of(4).read_text().splitlines()]
    assert [t["reward"] for t in written] == [1.0, 0.0]


def test_without_an_evaluation_there_is_none_to_read(tmp_path):
    with pytest.raises(DataError, match="no evaluation is recorded"):
        last_evaluation(tmp_path / "evaluations.jsonl")
    (tmp_path / "evaluations.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match="no evaluation is recorded"):
        last_evaluation(tmp_path / "evaluations.jsonl")


def test_a_line_torn_by_a_crash_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    append_line(path, b'{"step": 2}')
    lines = path.read_bytes().splitlines()
    assert lines[-1] == b'{"step": 2}'
    assert lines[1] == b'{"step": 2, "rew'
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(lines[1])


def test_a_full_disk_is_the_machines_fault_and_says_which_file(tmp_path):
    (tmp_path / "reconfigurations.jsonl").symlink_to("/dev/full")
    with pytest.raises(SiteError, match=r"reconfigurations\.jsonl cannot be written: No space"):
        append_line(tmp_path / "reconfigurations.jsonl", b"{}")


def test_so_it_is_for_the_trajectories_that_a_record_needs(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.create()
    (closed,), (record, trajectories) = closed_step(StepBook()), evaluated()
    step, evaluation = directory.trajectories_of(6), directory.evaluated_of(4)
    for path in (step, evaluation):
        # Where the file grows before it is renamed.
        partial_sibling(path).symlink_to("/dev/full")
    writer = RecordsWriter(directory)
    with pytest.raises(SiteError, match=rf"cannot write {step}: No space left on device"):
        writer.write_step(closed.record, closed.groups)
    with pytest.raises(SiteError, match=rf"cannot write {evaluation}: No space left on device"):
        writer.write_evaluation(record, trajectories)
    # No line promises what is not there.
    assert not directory.metrics.exists()
    assert not directory.evaluations.exists()


def test_a_line_that_the_disk_takes_in_pieces_is_whole(tmp_path, monkeypatch):
    path, write = tmp_path / "metrics.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:7]))
    append_line(path, b'{"step": 1, "reward": 0.5}')
    append_line(path, b'{"step": 2}')
    assert path.read_bytes() == b'{"step": 1, "reward": 0.5}\n{"step": 2}\n'


def test_what_was_decided_and_how_it_ended_are_lines_told_apart_by_their_kind(tmp_path):
    directory = RunDirectory(tmp_path)
    plan = configured_plan(RunConfig(model=ModelConfig(model_path="m")))
    writer = RecordsWriter(directory)
    decided = DecisionRecord(
        decision_id=3,
        wall_time_ns=1,
        step=7,
        verdict="switch",
        switch_kind="rollout",
        reason="two instances answer sooner",
        numbers={"gain_s": 2.5},
        plan="one",
        candidate="two",
    )
    ended = ReconfigurationRecord(
        decision_id=3,
        wall_time_ns=2,
        step=8,
        strategy="diff",
        outcome="done",
        reason="two instances answer sooner",
        total_s=40.0,
        stalled_s=0.0,
        phases={"start": 38.0},
        transitions=("start vllm-1",),
        started=(InstanceId("vllm-1"),),
        plan=plan,
    )
    for line in (decided, ended):
        writer.write_reconfiguration(line)
    lines = directory.reconfigurations.read_bytes().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["decision", "reconfiguration"]
    assert [msgspec.json.decode(line, type=Line) for line in lines] == [decided, ended]


def test_attempts_are_counted_through_all_supervisors_of_a_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_attempt(path) == 0
    path.write_bytes(b'{"step": 1, "attempt": 1}\n{"step": 2, "attempt": 3}\n{"step": 3, "att')
    assert last_attempt(path) == 3


def test_ids_of_decisions_go_on_from_the_highest_of_either_kind_of_line(tmp_path):
    path = tmp_path / "reconfigurations.jsonl"
    assert last_decision_id(path) == 0
    path.write_bytes(
        b'{"kind": "decision", "decision_id": 8}\n'
        b'{"kind": "reconfiguration", "decision_id": 7}\n{"kind": "decision", "decisi'
    )
    assert last_decision_id(path) == 8

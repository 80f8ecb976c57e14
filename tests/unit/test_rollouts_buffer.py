from math import inf

import msgspec
import pytest

from libra.errors import DataError, InvariantError
from libra.ids import PolicyVersion
from libra.rollouts.accounts import BufferLimits, in_words
from libra.rollouts.buffer import BufferState, CancelGroup, QuarantinePrompt, RolloutBuffer
from libra.rollouts.generation import completion_error, joined
from trajectories import admitted, complete, completion, prompt, trajectory

V0, V1, V2 = PolicyVersion(0), PolicyVersion(1), PolicyVersion(2)


def limits(**changes):
    defaults = {
        "n_samples": 2,
        "batch_size": 4,
        "max_concurrent": 100,
        "max_head_offpolicyness": 1,
    }
    return BufferLimits(**{**defaults, **changes})


def start(buffer, group, now=0.0):
    for index in range(group.n_samples):
        buffer.on_started(group.group_id, index, now=now)


def finish(buffer, group, *, version=0, rewards=(0.0, 1.0)):
    start(buffer, group)
    for index, reward in enumerate(rewards):
        buffer.on_finished(trajectory(group, index, version=version, reward=reward))


def test_groups_are_admitted_whole():
    buffer = RolloutBuffer(limits(max_concurrent=5))
    assert buffer.num_admissible(serving_version=V0) == 2
    buffer.admit(prompt(0))
    buffer.admit(prompt(1))
    assert buffer.num_admissible(serving_version=V0) == 0


def test_groups_may_complete_in_any_order_and_are_taken_in_that_of_the_data():
    buffer = RolloutBuffer(limits())
    groups = [buffer.admit(prompt(row)) for row in range(3)]
    start(buffer, groups[0])
    finish(buffer, groups[2])
    finish(buffer, groups[1])
    batch = buffer.take_batch(version=V0)
    assert [g.group_id for g in batch] == [groups[1].group_id, groups[2].group_id]
    assert [t.sample_index for t in batch[0].trajectories] == [0, 1]


def test_batches_ahead_are_counted_at_the_versions_that_would_take_them():
    buffer = RolloutBuffer(limits())
    groups = [buffer.admit(prompt(row)) for row in range(7)]
    for group, version in zip(groups, (0, 0, 1, 1, 1, 1, 2), strict=True):
        finish(buffer, group, version=version)
    # v1 may take those of v0, v2 and no later one those of v1, and one of v2 is no batch.
    assert buffer.num_batches(version=V1) == 2
    assert buffer.num_batches(version=V2) == 1
    assert buffer.has_batch(version=V2)
    buffer.take_batch(version=V1)
    buffer.take_batch(version=V2)
    assert buffer.num_batches(version=PolicyVersion(3)) == 0
    assert not buffer.has_batch(version=PolicyVersion(3))


def test_the_oldest_groups_are_trained_on_first():
    buffer = RolloutBuffer(limits())
    groups = [buffer.admit(prompt(row)) for row in range(3)]
    for group, version in zip(groups, (1, 1, 0), strict=True):
        finish(buffer, group, version=version)
    batch = buffer.take_batch(version=V1)
    assert [g.oldest_version for g in batch] == [0, 1]


@pytest.mark.case("T-B54")
def test_a_failed_sample_takes_its_group_out_and_its_prompt_is_tried_again():
    buffer = RolloutBuffer(limits())
    group = buffer.admit(prompt(7))
    start(buffer, group)
    commands = buffer.on_failed(group.group_id, 1, "engine", "no answer")
    assert commands == (CancelGroup(group.group_id),)
    assert (buffer.counts.running, buffer.counts.dropped) == (0, 2)
    assert buffer.dropped_by_reason == {"engine": 1, "sibling": 1}
    again = buffer.admit_pending()
    assert (again.prompt, again.attempt) == (prompt(7), 1)
    assert again.group_id != group.group_id


def test_late_news_of_a_group_that_has_left_changes_nothing_but_a_count():
    buffer = RolloutBuffer(limits())
    group = buffer.admit(prompt(7))
    start(buffer, group)
    buffer.on_failed(group.group_id, 0, "engine", "no answer")
    before = buffer.counts
    assert buffer.on_finished(trajectory(group, 1)) == ()
    assert buffer.on_failed(group.group_id, 1, "timeout", "silent") == ()
    assert buffer.counts == before
    assert buffer.num_late_reports == 2


def test_a_prompt_that_always_fails_is_quarantined():
    buffer = RolloutBuffer(limits(max_group_attempts=2))
    group = buffer.admit(prompt(3))
    assert len(buffer.on_failed(group.group_id, 0, "reward", "returned nan")) == 1
    group = buffer.admit_pending()
    commands = buffer.on_failed(group.group_id, 0, "reward", "returned nan")
    assert commands[1] == QuarantinePrompt(prompt(3).prompt_id, "reward: returned nan")
    assert buffer.admit_pending() is None
    assert buffer.admit(prompt(3, epoch=1)) is None
    assert buffer.admit(prompt(4)) is not None


def test_a_waiting_try_of_a_prompt_that_was_quarantined_meanwhile_is_not_admitted():
    buffer = RolloutBuffer(limits(max_group_attempts=2))
    first = buffer.admit(prompt(3))
    second = buffer.admit(prompt(3, epoch=1))
    buffer.on_failed(first.group_id, 0, "workflow", "")
    retry = buffer.admit_pending()
    buffer.on_failed(second.group_id, 0, "workflow", "")
    buffer.on_failed(retry.group_id, 0, "workflow", "")
    assert buffer.admit_pending() is None


@pytest.mark.parametrize("kind", ["engine", "timeout", "lease", "cancelled"])
def test_what_engines_do_to_a_prompt_is_not_its_fault(kind):
    buffer = RolloutBuffer(limits(max_group_attempts=2))
    group = buffer.admit(prompt(3))
    for _ in range(10):
        assert len(buffer.on_failed(group.group_id, 0, kind, "it crashed")) == 1
        group = buffer.admit_pending()
    assert group.attempt == 10
    assert len(buffer.on_failed(group.group_id, 0, "reward", "returned nan")) == 1
    group = buffer.admit_pending()
    assert len(buffer.on_failed(group.group_id, 0, "reward", "returned nan")) == 2
    assert buffer.quarantined == {prompt(3).prompt_id}


def test_a_prompt_that_always_takes_its_engine_with_it_is_given_up_in_the_end():
    buffer = RolloutBuffer(limits(max_group_attempts=2))
    group = buffer.admit(prompt(3))
    for _ in range(19):
        assert len(buffer.on_failed(group.group_id, 0, "engine", "it crashed")) == 1
        group = buffer.admit_pending()
    commands = buffer.on_failed(group.group_id, 0, "engine", "it crashed")
    assert commands[1] == QuarantinePrompt(prompt(3).prompt_id, "engine: it crashed")


@pytest.mark.case("T-B25")
def test_a_run_whose_every_prompt_is_quarantined_says_why_it_cannot_go_on():
    buffer = RolloutBuffer(limits(max_group_attempts=1))
    buffer.on_failed(buffer.admit(prompt(0)).group_id, 0, "reward", "returned None")
    buffer.check_prompts_left(2)
    buffer.on_failed(buffer.admit(prompt(1)).group_id, 0, "reward", "returned None")
    with pytest.raises(DataError, match=r"all 2 prompts failed 1 times each \(2 reward, 2 sibl"):
        buffer.check_prompts_left(2)


@pytest.mark.case("T-B56")
def test_a_running_sample_that_stays_silent_loses_its_lease():
    buffer = RolloutBuffer(limits(lease_s=10.0))
    groups = [buffer.admit(prompt(row)) for row in range(2)]
    for group in groups:
        start(buffer, group, now=0.0)
        buffer.on_progress(group.group_id, 0, now=6.0)
    buffer.on_progress(groups[0].group_id, 1, now=6.0)
    assert buffer.oldest_wait() == (groups[1].group_id, 0.0)
    assert buffer.on_tick(now=10.0) == ()
    assert buffer.on_tick(now=10.1) == (CancelGroup(groups[1].group_id),)
    assert buffer.dropped_by_reason == {"lease": 1, "sibling": 1}
    assert buffer.counts.running == 2


@pytest.mark.case("T-B59")
@pytest.mark.parametrize(("bound", "fits"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
def test_a_group_is_used_up_to_the_bound_and_dropped_after_it(bound, fits):
    for age in range(4):
        buffer = RolloutBuffer(limits(max_head_offpolicyness=bound))
        for row in range(2):
            finish(buffer, buffer.admit(prompt(row)), version=0)
        batch = buffer.take_batch(version=PolicyVersion(age))
        assert (batch is not None) == (age in fits)
        assert buffer.dropped_by_reason.get("stale", 0) == (0 if batch else 4)


def test_a_prompt_whose_group_came_too_late_is_tried_again_but_never_quarantined():
    buffer = RolloutBuffer(limits(max_head_offpolicyness=0, max_group_attempts=2))
    finish(buffer, buffer.admit(prompt(5)), version=0)
    assert buffer.drop_stale(version=V1) == 2
    retry = buffer.admit_pending()
    finish(buffer, retry, version=0)
    assert buffer.drop_stale(version=V1) == 2
    assert buffer.admit_pending() is None
    assert buffer.quarantined == frozenset()


def test_a_group_that_came_too_late_does_not_count_as_a_failure_of_its_prompt():
    buffer = RolloutBuffer(limits(max_head_offpolicyness=0, max_group_attempts=2))
    finish(buffer, buffer.admit(prompt(5)), version=0)
    buffer.drop_stale(version=V1)
    retry = buffer.admit_pending()
    assert len(buffer.on_failed(retry.group_id, 0, "reward", "returned nan")) == 1
    assert buffer.quarantined == frozenset()
    retry = buffer.admit_pending()
    commands = buffer.on_failed(retry.group_id, 0, "reward", "returned nan")
    assert commands[1] == QuarantinePrompt(prompt(5).prompt_id, "reward: returned nan")


@pytest.mark.case("T-B58")
def test_the_age_of_a_group_is_that_of_its_oldest_token():
    buffer = RolloutBuffer(limits(max_head_offpolicyness=0, batch_size=2))
    group = buffer.admit(prompt(0))
    start(buffer, group)
    buffer.on_finished(trajectory(group, 0, version=4))
    mixed = trajectory(group, 1, version=3, num_response=4)
    spans = (
        msgspec.structs.replace(mixed.version_spans[0], end=4),
        msgspec.structs.replace(mixed.version_spans[0], policy_version=V1, start=4),
    )
    buffer.on_finished(msgspec.structs.replace(mixed, version_spans=spans))
    assert buffer.take_batch(version=PolicyVersion(4)) is None
    assert buffer.dropped_by_reason == {"stale": 2}


@pytest.mark.case("T-B25")
def test_dynamic_sampling_drops_flat_groups_up_to_a_bound_per_batch():
    buffer = RolloutBuffer(limits(max_flat_drops=2, batch_size=2))
    for row in range(3):
        finish(buffer, buffer.admit(prompt(row)), rewards=(0.0, 0.0))
    assert buffer.dropped_by_reason == {"flat": 4}
    batch = buffer.take_batch(version=V0)
    assert [g.group_id for g in batch] == [admitted(2).group_id]
    finish(buffer, buffer.admit(prompt(3)), rewards=(1.0, 1.0))
    assert buffer.dropped_by_reason == {"flat": 6}


def test_the_last_step_bounds_what_is_started():
    buffer = RolloutBuffer(limits(last_step=1, max_head_offpolicyness=inf))
    assert buffer.num_admissible(serving_version=V0) == 2
    for row in range(2):
        finish(buffer, buffer.admit(prompt(row)))
    assert buffer.num_admissible(serving_version=V0) == 0
    buffer.take_batch(version=V0)
    assert buffer.num_admissible(serving_version=V1) == 0


@pytest.mark.parametrize("last_step", [None, 1000])
def test_without_a_staleness_bound_the_buffer_is_still_bounded(last_step):
    options = limits(max_head_offpolicyness=inf, max_concurrent=8, last_step=last_step)
    buffer = RolloutBuffer(options)
    row = 0
    while buffer.num_admissible(serving_version=V0):
        finish(buffer, buffer.admit(prompt(row)))
        row += 1
    assert buffer.counts.accepted == 12


@pytest.mark.case("T-B45", "T-B47")
def test_a_restored_buffer_goes_on_with_what_was_finished_and_tries_the_rest_again():
    buffer = RolloutBuffer(limits(max_group_attempts=2))
    groups = [buffer.admit(prompt(row)) for row in range(3)]
    finish(buffer, groups[0], version=1)
    start(buffer, groups[1])
    buffer.on_failed(groups[2].group_id, 0, "engine", "")
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(buffer.state()), type=BufferState)
    restored = RolloutBuffer.restored(limits(), state, version=V1)
    assert restored.counts.consumed == 4
    assert restored.counts.accepted == 2
    assert restored.dropped_by_reason == {"engine": 1, "sibling": 1}
    pending = [restored.admit_pending() for _ in range(3)]
    excused = msgspec.structs.replace(admitted(2, attempt=1), num_excused=1)
    assert pending == [groups[1], excused, None]


def test_a_rewound_run_does_not_use_groups_of_versions_that_are_no_more():
    state = BufferState(
        complete=(complete(admitted(0), version=2), complete(admitted(1), version=1)),
        pending=(),
        quarantined=(),
        dropped={},
    )
    restored = RolloutBuffer.restored(limits(), state, version=V1)
    assert restored.num_complete == 2
    assert restored.admit_pending() == admitted(0)


def test_groups_of_another_size_are_rolled_out_again_in_the_new_size():
    state = RolloutBuffer(limits()).state()
    state = msgspec.structs.replace(state, complete=(complete(admitted(0)),))
    restored = RolloutBuffer.restored(limits(n_samples=4), state, version=V0)
    assert restored.admit_pending() == admitted(0, n_samples=4)


def test_a_restored_quarantine_holds():
    state = BufferState(
        complete=(), pending=(), quarantined=(prompt(1).prompt_id,), dropped={"reward": 2}
    )
    restored = RolloutBuffer.restored(limits(), state, version=V0)
    assert restored.admit(prompt(1)) is None
    assert restored.counts.submitted == 2


def test_what_only_a_bug_can_do_is_an_invariant_error():
    buffer = RolloutBuffer(limits())
    group = buffer.admit(prompt(0))
    with pytest.raises(InvariantError, match="admitted twice"):
        buffer.admit(prompt(0))
    with pytest.raises(InvariantError, match="finished but was not running"):
        buffer.on_finished(trajectory(group, 0))
    buffer.on_started(group.group_id, 0, now=0.0)
    with pytest.raises(InvariantError, match="started twice"):
        buffer.on_started(group.group_id, 0, now=0.0)
    with pytest.raises(InvariantError, match="without a reward"):
        buffer.on_finished(trajectory(group, 0, reward=None))
    buffer.on_finished(trajectory(group, 0))
    with pytest.raises(InvariantError, match="reported twice"):
        buffer.on_failed(group.group_id, 0, "engine", "")
    with pytest.raises(InvariantError, match="groups never fit"):
        RolloutBuffer(limits(batch_size=3))
    with pytest.raises(InvariantError, match="groups never fit"):
        RolloutBuffer(limits(max_concurrent=1))


def test_signs_of_life_of_what_does_not_run_change_nothing():
    buffer = RolloutBuffer(limits(lease_s=1.0))
    group = buffer.admit(prompt(0))
    buffer.on_progress(group.group_id, 0, now=5.0)
    buffer.on_progress(admitted(9).group_id, 0, now=5.0)
    buffer.on_started(admitted(9).group_id, 0, now=5.0)
    assert buffer.num_late_reports == 1
    assert buffer.oldest_wait() is None
    assert buffer.on_tick(now=100.0) == ()


def test_a_continuation_must_continue_what_was_answered():
    first = completion((10, 11), finish_reason="abort", num_prompt_tokens=5)
    first = msgspec.structs.replace(first, num_cached_tokens=3)
    whole = joined(first, completion((12,), version=1, num_prompt_tokens=7))
    assert (whole.token_ids, whole.num_prompt_tokens) == ((10, 11, 12), 5)
    # Of the prompt that was asked for; of the continuation's, the answer so far is a part.
    assert whole.num_cached_tokens == 3
    assert completion_error(whole) is None
    with pytest.raises(InvariantError, match="a continuation has 6 prompt tokens, not 5 and 2"):
        joined(first, completion((12,), num_prompt_tokens=6))


def test_drops_are_told_in_words():
    assert in_words({"engine": 3, "sibling": 21, "stale": 0}) == "21 sibling, 3 engine"
    assert in_words({}) == "none"


def test_a_part_of_a_batch_is_a_multiple_of_what_divides_it_and_the_rest_is_written_off():
    buffer = RolloutBuffer(limits(batch_size=12, max_head_offpolicyness=0))
    groups = [buffer.admit(prompt(row)) for row in range(6)]
    for group in groups[:5]:
        finish(buffer, group)
    assert buffer.take_batch(version=V0) is None
    assert buffer.take_partial(version=V0, multiple=16) is None
    taken = buffer.take_partial(version=V0, multiple=4)
    assert [g.admitted for g in taken] == groups[:4]
    counts = buffer.counts
    assert (counts.consumed, counts.written_off, counts.accepted) == (8, 4, 2)
    # Staleness counts in whole batches: what was written off makes no room at this version.
    assert buffer.num_admissible(serving_version=V0) == 0
    start(buffer, groups[5])
    assert buffer.num_admissible(serving_version=V1) == 4


def test_only_samples_that_have_run_for_long_are_asked_for_again():
    buffer = RolloutBuffer(limits(batch_size=8))
    old, young, done = (buffer.admit(prompt(row)) for row in range(3))
    buffer.on_started(old.group_id, 0, now=0.0)
    buffer.on_started(old.group_id, 1, now=0.0)
    buffer.on_finished(trajectory(old, 0))
    buffer.on_progress(old.group_id, 1, now=90.0)
    start(buffer, young, now=60.0)
    finish(buffer, done)
    assert {it.group_id: it.samples for it in buffer.missing()} == {
        old.group_id: (1,),
        young.group_id: (0, 1),
    }
    assert buffer.ask_again(asked_before=50.0, now=100.0) == {old.group_id: (1,)}
    assert buffer.ask_again(asked_before=50.0, now=100.0) == {}
    # The second try ends the sample as the first would have.
    buffer.on_finished(trajectory(old, 1))
    assert buffer.num_complete == 4

import anyio
import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from libra import clock
from libra.errors import RefusedError
from libra.serving.gate import Gate
from libra.serving.ledger import VersionLedger, spans_of


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


def spans(first, request, num_tokens):
    found = spans_of(first, request, num_tokens)
    return [(span.policy_version, span.start, span.end) for _, span in found]


def test_a_request_within_one_epoch_has_one_span():
    ledger = VersionLedger(4)
    assert spans(ledger.current, "r", 10) == [(4, 0, 10)]
    assert spans(ledger.current, "r", 0) == []


def test_a_request_that_finished_before_the_load_keeps_its_version_when_answered_after():
    ledger = VersionLedger(4)
    first = ledger.current
    ledger.begin(5, {"other": 3})
    assert spans(first, "r", 10) == [(4, 0, 10)]


def test_a_request_across_three_epochs_is_cut_at_the_engines_counts():
    ledger = VersionLedger(4)
    first = ledger.current
    ledger.begin(5, {"r": 3})
    ledger.begin(6, {"r": 3})
    ledger.begin(7, {"r": 8})
    assert spans(first, "r", 10) == [(4, 0, 3), (6, 3, 8), (7, 8, 10)]


def test_a_request_waiting_through_a_load_belongs_to_the_new_version_only():
    ledger = VersionLedger(4)
    first = ledger.current
    ledger.begin(5, {"r": 0})
    assert spans(first, "r", 10) == [(5, 0, 10)]


def test_tokens_taken_back_by_a_stop_string_end_the_spans_earlier():
    ledger = VersionLedger(4)
    first = ledger.current
    ledger.begin(5, {"r": 8})
    assert spans(first, "r", 6) == [(4, 0, 6)]


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(0, 5))
def test_spans_always_cover_the_tokens_without_gaps(steps, last_step):
    ledger, total = VersionLedger(0), 0
    first = ledger.current
    for version, step in enumerate(steps, start=1):
        total += step
        ledger.begin(version, {"r": total})
    total += last_step
    found = spans(first, "r", total)
    assert [s for _, s, _ in found] == [0, *(e for *_, e in found)][: len(found)]
    assert sum(e - s for _, s, e in found) == total
    made_by = [step for step in [*steps, last_step] if step]
    assert [e - s for _, s, e in found] == made_by


def test_the_version_is_known_only_while_it_is_proven():
    ledger = VersionLedger(4)
    assert ledger.version == 4
    ledger.begin(5, {})
    assert ledger.version is None
    ledger.prove()
    assert ledger.version == 5
    ledger.lose()
    assert ledger.version is None


@pytest.mark.anyio
async def test_losing_the_weights_leaves_the_tokens_of_a_proven_epoch_good_and_voiding_does_not():
    ledger = VersionLedger(4)
    proven = ledger.current
    ledger.lose()
    assert await proven.wait_until_judged()
    ledger.begin(5, {})
    unproven = ledger.current
    ledger.lose()
    assert not await unproven.wait_until_judged()
    ledger.begin(6, {})
    ledger.prove()
    ledger.void()
    assert not await ledger.current.wait_until_judged()


@pytest.mark.anyio
async def test_an_answer_waits_for_the_proof_of_its_epoch():
    ledger = VersionLedger(4)
    ledger.begin(5, {})
    began_at = clock.now()

    async def prove_later():
        await clock.sleep(2.0)
        ledger.prove()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(prove_later)
        assert await ledger.current.wait_until_judged()
    assert clock.now() - began_at == 2.0


@pytest.mark.anyio
async def test_closing_the_gate_waits_for_those_on_the_threshold():
    gate, order = Gate(), []

    async def enter():
        async with gate.entry():
            order.append("in")
            await clock.sleep(1.0)
            order.append("through")

    async def enter_late():
        await clock.sleep(0.5)
        async with gate.entry():
            order.append("late")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        tasks.start_soon(enter_late)
        await clock.sleep(0.1)
        await gate.close()
        order.append("closed")
        await clock.sleep(1.0)
        gate.open()
    assert order == ["in", "through", "closed", "late"]


@pytest.mark.anyio
async def test_a_refusing_gate_turns_away_who_waits_and_who_comes_even_when_closed_again():
    gate, refused = Gate(), []

    async def enter():
        try:
            async with gate.entry():
                raise AssertionError("let in")
        except RefusedError as error:
            refused.append(str(error))

    await gate.close()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        await clock.sleep(1.0)
        gate.refuse("the load failed")
    await gate.close()
    await enter()
    assert refused == ["weights unknown: the load failed"] * 2
    assert gate.refusal == "weights unknown: the load failed"
    gate.open()
    assert gate.refusal is None
    async with gate.entry():
        pass

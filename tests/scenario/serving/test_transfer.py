"""A guarded reload whose weights come through a group."""

import msgspec
import pytest

from fake_engine import probe_logprobs
from libra.transfer.outcome import TransferOutcome, joint_checksum, outcome_of
from libra.weights.judge import ack_problems
from libra.wire.instance import TransferTensor

pytestmark = pytest.mark.anyio

JOIN, RECEIVE = "libra_join_transfer", "libra_receive_weights"
ABORTED = TransferOutcome(error="vllm-9: its process was lost", was_aborted=True)


def names(app):
    return [call[0] for call in app.engine.calls]


async def test_a_transfer_is_proven_in_every_field(app, running):
    async with running():
        request = app.transfer_for(2)
        ack = await app.receive(request)
        state = await app.state()
    assert ack.error is None
    assert ack_problems(request, ack) == ()
    assert (ack.method, ack.checksum) == ("inplace", "sum")
    assert ack.probe_logprobs == probe_logprobs(request.probe_token_ids, 2)
    assert ack.model_load_s == pytest.approx(0.5, abs=0.4)
    assert (state["policy_version"], state["manifest_hash"]) == (2, "offer-2")


async def test_a_server_joins_before_its_pause_and_at_its_own_rank(app, running):
    async with running():
        await app.receive(app.transfer_for(1))
    assert names(app) == [
        JOIN,
        "pause",
        RECEIVE,
        "reset_mm_cache",
        "reset_prefix_cache",
        "libra_begin_version",
        "resume",
    ]
    assert app.engine.calls[0] == (JOIN, 2)


async def test_a_group_is_joined_once_and_another_one_again(app, running):
    async with running():
        for version, group_id in ((1, "a"), (2, "a"), (3, "b")):
            assert (await app.receive(app.transfer_for(version, group_id=group_id))).error is None
    assert names(app).count(JOIN) == 2


@pytest.mark.case("T-B68")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensors": (TransferTensor("model.embed_tokens.weight", "F32", (16, 4)),)}, "is missing"),
        ({"tied_embeddings": True}, "do not agree on tied embeddings"),
        ({"rank_offset_of": {"vllm-9": 1}}, "vllm-0 has no rank"),
    ],
)
async def test_what_does_not_fit_is_refused_before_anything_is_touched(app, running, changes, said):
    async with running():
        ack = await app.receive(app.transfer_for(1, **changes))
        answer = await app.complete()
    assert said in ack.error
    assert not ack.was_aborted
    assert app.engine.calls == []
    assert ack.policy_version == 0
    assert answer.status == 200


async def test_a_wrong_shape_is_named(app, running):
    request = app.transfer_for(1)
    first, *rest = request.transfer.tensors
    wrong = msgspec.structs.replace(first, shape=(4, 16))
    transfer = msgspec.structs.replace(request.transfer, tensors=(wrong, *rest))
    async with running():
        ack = await app.receive(msgspec.structs.replace(request, transfer=transfer))
    assert "has shape [4, 16] instead of [16, 4]" in ack.error
    assert app.engine.calls == []


async def test_a_group_that_does_not_come_together_leaves_the_server_as_it_was(app, running):
    async with running():
        app.engine.transfer_outcome = ABORTED
        ack = await app.receive(app.transfer_for(1))
        answer = await app.complete(max_tokens=3)
    assert ack.was_aborted
    assert ack.error == "vllm-9: its process was lost"
    assert ack.policy_version == 0
    assert names(app) == [JOIN]
    assert answer.json["choices"][0]["libra_version_spans"] == [[0, 0, 3]]


@pytest.mark.parametrize(
    "outcome", [ABORTED, TransferOutcome(error="the weights came with checksum x, sent was y")]
)
async def test_a_transfer_that_breaks_off_leaves_a_closed_gate_until_one_succeeds(
    app, running, outcome
):
    async with running():
        request = app.transfer_for(1)
        await app.receive(request)
        app.engine.transfer_outcome = outcome
        ack = await app.receive(app.transfer_for(2))
        refused = await app.complete()
        state = await app.state()
        again = await app.receive(app.transfer_for(2))
        answer = await app.complete(max_tokens=3)
    assert ack.error is not None
    assert ack.was_aborted == outcome.was_aborted
    assert (ack.policy_version, state["policy_version"]) == (None, None)
    assert refused.status == 503
    assert refused.json["error"]["message"].startswith("weights unknown")
    assert again.error is None
    assert names(app).count(JOIN) == 2, "a broken group was used again"
    assert answer.json["choices"][0]["token_ids"] == [2000, 2001, 2002]


async def test_a_version_that_is_not_newer_is_refused(app, running):
    async with running():
        await app.receive(app.transfer_for(2))
        ack = await app.receive(app.transfer_for(2))
    assert "not newer than the loaded v2" in ack.error


async def test_transfers_and_reloads_from_disk_follow_each_other(app, running):
    async with running():
        acks = [await app.receive(app.transfer_for(1)), await app.reload(2)]
        acks.append(await app.receive(app.transfer_for(3)))
        answer = await app.complete(max_tokens=2)
    assert [ack.error for ack in acks] == [None] * 3
    assert answer.json["choices"][0]["token_ids"] == [3000, 3001]


def test_one_workers_own_fault_says_more_than_what_it_did_to_the_others():
    own = TransferOutcome(error="RuntimeError: out of memory").as_builtins()
    with pytest.raises(Exception, match="out of memory") as raised:
        joint_checksum([ABORTED.as_builtins(), own])
    assert not outcome_of(raised.value).was_aborted
    with pytest.raises(Exception, match="its process was lost") as raised:
        joint_checksum([ABORTED.as_builtins(), TransferOutcome(checksum="a").as_builtins()])
    assert outcome_of(raised.value).was_aborted


def test_workers_that_received_different_weights_have_not_received_any():
    answers = [TransferOutcome(checksum=it).as_builtins() for it in "ab"]
    with pytest.raises(Exception, match="the workers received different weights"):
        joint_checksum(answers)

import math

import msgspec
import pytest

from libra.errors import InvariantError
from libra.weights.judge import (
    BY_RECEIPT,
    BY_TRANSFER,
    ack_problems,
    judge_acks,
    probe_tolerance_of,
)
from libra.wire.instance import WeightsReceipt, WeightsTransfer
from reload_messages import reload_ack, reload_request

REQUEST = reload_request()


def judged(*acks, trainer=(-1.0, -1.0), tolerance=1e-3):
    return judge_acks(REQUEST, acks, trainer_probe_logprobs=trainer, probe_tolerance=tolerance)


def test_right_acks_are_accepted_and_the_slowest_is_named():
    verdict = judged(
        reload_ack(REQUEST, "a", total_s=1.5),
        reload_ack(REQUEST, "b", total_s=2.5),
        reload_ack(REQUEST, "c"),
    )
    assert verdict.accepted == ("a", "b", "c")
    assert verdict.refused == {}
    assert (verdict.slowest_instance, verdict.slowest_total_s) == ("b", 2.5)
    assert verdict.probe_difference == 0.0
    assert verdict.policy_version == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "run-2"}, "run id"),
        ({"nonce": "nonce-0"}, "nonce"),
        ({"policy_version": 6}, "policy version is 6"),
        ({"manifest_hash": "hash-6"}, "manifest hash"),
        ({"lock_wait_s": -0.1}, "lock_wait_s is -0.1"),
        ({"model_load_s": math.nan}, "model_load_s is nan"),
        ({"total_s": math.inf}, "total_s is inf"),
        ({"model_load_s": 1.1}, "more than its total"),
        ({"lock_wait_s": 0.3, "model_load_s": 0.8}, "more than its total"),
        ({"process_stop_s": 0.1}, "stopped a process"),
        ({"verified": ("manifest", "files", "load")}, "verified"),
        ({"verified": ("files", "manifest", "load", "probe")}, "verified"),
        ({"probe_logprobs": (-1.0,)}, "1 probe logprobs instead of 2"),
        ({"probe_logprobs": (-1.0, math.nan)}, "not finite"),
        ({"error": "no memory"}, "the reload failed: no memory"),
    ],
)
def test_every_wrong_field_is_refused_by_name(changes, message):
    verdict = judged(reload_ack(REQUEST, "a", **changes), reload_ack(REQUEST, "b"))
    assert verdict.accepted == ("b",)
    assert message in verdict.refused["a"]
    assert verdict.slowest_instance == "b"


def test_all_wrong_fields_are_named_at_once():
    refused = judged(reload_ack(REQUEST, "a", nonce="x", total_s=-1.0)).refused["a"]
    assert "nonce" in refused
    assert "total_s" in refused


def test_an_instance_that_answered_twice_is_refused():
    verdict = judged(reload_ack(REQUEST, "a"), reload_ack(REQUEST, "b"), reload_ack(REQUEST, "a"))
    assert verdict.accepted == ("b",)
    assert verdict.refused == {"a": "it answered more than once"}


def test_a_probe_beyond_tolerance_is_reported_and_beyond_ten_times_refused():
    near = judged(reload_ack(REQUEST, "a", probe_logprobs=(-1.0, -1.005)))
    assert near.accepted == ("a",)
    assert near.probe_difference == pytest.approx(0.005)
    far = judged(reload_ack(REQUEST, "a", probe_logprobs=(-1.0, -1.02)))
    assert far.accepted == ()
    assert "the trainer's" in far.refused["a"]
    assert far.probe_difference == pytest.approx(0.02)


def test_a_probe_that_cannot_be_compared_is_infinitely_far_off():
    verdict = judged(reload_ack(REQUEST, "a"), trainer=(-1.0,))
    assert verdict.accepted == ()
    assert verdict.probe_difference == math.inf


def test_a_batch_without_acks_accepts_nobody():
    verdict = judged()
    assert (verdict.accepted, verdict.slowest_instance, verdict.slowest_total_s) == ((), None, 0.0)


def test_rounding_of_the_sum_is_not_taken_for_a_lie():
    ack = reload_ack(REQUEST, "a", lock_wait_s=0.1, model_load_s=0.2, total_s=0.3)
    assert ack.lock_wait_s + ack.model_load_s > ack.total_s
    assert judged(ack).accepted == ("a",)


def test_a_restart_may_take_time_to_stop_the_old_process():
    ack = reload_ack(REQUEST, "a", method="restart", process_stop_s=0.4)
    assert judged(ack).accepted == ("a",)


def test_a_process_that_started_from_a_version_has_read_it_itself():
    request = reload_request(receipt=WeightsReceipt("boot", ()))
    inplace = reload_ack(request, "a", verified=BY_RECEIPT)
    assert ack_problems(request, inplace) == ()
    restarted = msgspec.structs.replace(inplace, method="restart")
    (problem,) = ack_problems(request, restarted)
    assert problem.startswith("it verified ['manifest', 'receipt'")


def test_the_tolerance_depends_on_the_dtype():
    assert probe_tolerance_of("float32") == 1e-3
    assert probe_tolerance_of("bfloat16") == probe_tolerance_of("float16") == 3e-2
    with pytest.raises(InvariantError, match="int8"):
        probe_tolerance_of("int8")


TRANSFER = WeightsTransfer(
    group_id="g",
    store_host="127.0.0.1",
    store_port=1,
    world_size=2,
    rank_offset_of={"a": 1},
    tied_embeddings=False,
    tensors=(),
    bucket_bytes=1,
    timeout_s=1.0,
    stall_s=1.0,
)


def test_a_transfer_is_proved_by_other_checks_and_by_the_senders_checksum():
    request = reload_request(transfer=TRANSFER)
    right = {"verified": BY_TRANSFER, "checksum": "sum"}
    verdict = judge_acks(
        request,
        [
            reload_ack(request, "a", **right),
            reload_ack(request, "b", **right | {"checksum": "mus"}),
            reload_ack(request, "c", checksum="sum"),
        ],
        trainer_probe_logprobs=(-1.0, -1.0),
        probe_tolerance=1e-3,
        checksum="sum",
    )
    assert verdict.accepted == ("a",)
    assert verdict.refused["b"] == "it received weights with checksum 'mus', sent was 'sum'"
    assert "instead of ['tensors', 'checksum', 'load', 'probe']" in verdict.refused["c"]
    # Nor does what proves a transfer prove a reload from files.
    assert "verified" in judged(reload_ack(REQUEST, "a", **right)).refused["a"]

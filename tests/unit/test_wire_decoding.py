import pytest

from libra.errors import PeerError
from libra.ids import InstanceId
from libra.wire.api import VerbRequest
from libra.wire.decoding import decoded, decoded_json
from libra_supervisor.instances.answers import completion_of, prompt_logprobs_of

DEEP = 200_000
NESTED = {"json": b'{"more": ' + b"[" * DEEP + b"]" * DEEP + b"}", "msgpack": b"\x91" * DEEP}
VLLM = InstanceId("vllm-0")


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (NESTED["json"], dict, "nested too deeply"),
        (b"\xff", VerbRequest, r"utf-8|JSON"),
        (b"{", VerbRequest, "truncated"),
        (b'{"dry_run": 3}', VerbRequest, "Expected `bool`"),
    ],
)
def test_json_that_makes_no_sense_is_a_peer_s_error(message, kind, reason):
    with pytest.raises(PeerError, match=reason):
        decoded_json(message, kind)


def test_msgpack_that_is_nested_without_end_is_a_peer_s_error():
    with pytest.raises(PeerError, match="nested too deeply"):
        decoded(NESTED["msgpack"], list)


def test_an_engine_s_answer_may_be_nested_as_it_likes():
    with pytest.raises(PeerError, match=r"vllm-0 gave an answer .* nested too deeply"):
        completion_of(NESTED["json"], VLLM, num_prompt_tokens=1)
    with pytest.raises(PeerError, match=r"vllm-0 gave no prompt logprobs: .* nested too deeply"):
        prompt_logprobs_of(NESTED["json"], VLLM, (1, 2))

"""Sizing up requests and counting answers, byte by byte."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import DrainingError, InvariantError, OverloadedError, PeerError, RejectedError
from libra_supervisor.gateway.output_count import StreamCount, tokens_in_answer
from libra_supervisor.gateway.question import COMPLETIONS_DEFAULT_TOKENS, read_question
from libra_supervisor.gateway.refusal import error_event, refusal

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def size_of(body, route=TEXT):
    return read_question(msgspec.json.encode(body), route, chat_default_tokens=256)


@given(st.lists(st.integers(0, 200_000)))
def test_token_ids_are_counted_exactly(token_ids):
    assert size_of({"prompt": token_ids, "max_tokens": 4}).num_prompt_tokens == len(token_ids)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_tokens": 7, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 7, "n": 3}, 21),
        ({}, COMPLETIONS_DEFAULT_TOKENS),
        ({"max_tokens": None, "n": None}, COMPLETIONS_DEFAULT_TOKENS),
        ({"max_tokens": "many", "n": True}, COMPLETIONS_DEFAULT_TOKENS),
        ({"max_tokens": -5}, COMPLETIONS_DEFAULT_TOKENS),
        ({"max_tokens": 8.0}, 8),
        ({"max_tokens": 10**30}, COMPLETIONS_DEFAULT_TOKENS),
    ],
)
def test_the_limit_is_read_and_what_it_cannot_be_is_left_to_the_engine(body, limit):
    assert size_of(body | {"prompt": "x"}).max_new_tokens == limit


def test_text_and_messages_are_sized_by_their_characters():
    text = size_of({"prompt": "word " * 100})
    assert (text.num_prompt_tokens, text.num_prompt_chars) == (None, 502)
    chat = size_of({"messages": [{"role": "user", "content": "x" * 400}]}, CHAT)
    assert chat.num_prompt_tokens is None
    assert 400 < chat.num_prompt_chars < 450
    assert chat.max_new_tokens == 256
    several = size_of({"prompt": ["one", "two, three"]})
    assert several.num_prompt_tokens is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": '])
def test_what_is_no_json_object_is_rejected(body):
    with pytest.raises(RejectedError, match="not a JSON object"):
        read_question(body, TEXT, chat_default_tokens=1)


@given(text=st.text(), num_tokens=st.integers(0, 10**6))
def test_usage_is_found_whatever_the_text_says(text, num_tokens):
    body = {"choices": [{"text": text + '"completion_tokens":99'}]}
    usage = {"usage": {"completion_tokens": num_tokens, "total_tokens": 7}}
    assert tokens_in_answer(msgspec.json.encode(body | usage)) == num_tokens
    assert tokens_in_answer(msgspec.json.encode(usage | body)) == num_tokens
    assert tokens_in_answer(msgspec.json.encode(body)) is None


def event(content):
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


@given(
    texts=st.lists(st.text(max_size=8)),
    has_usage=st.booleans(),
    has_error=st.booleans(),
    cuts=st.lists(st.integers(1, 60)),
)
def test_a_stream_is_counted_however_it_is_cut(texts, has_usage, has_error, cuts):
    events = [event({"choices": [{"text": text + 'data: {"error"\n\n'}]}) for text in texts]
    events += [event({"usage": {"completion_tokens": 77}})] if has_usage else []
    events += [event({"error": {"message": "x"}})] if has_error else []
    stream = b"".join([*events, b"data: [DONE]\n\n"])
    whole = StreamCount()
    whole.feed(stream)
    assert whole.has_error == has_error
    assert whole.num_tokens == (77 if has_usage else len(texts) + has_error)
    pieces, at = StreamCount(), 0
    for cut in [*cuts, len(stream)]:
        pieces.feed(stream[at : at + cut])
        at += cut
    assert pieces.has_error == has_error
    assert pieces.num_tokens == whole.num_tokens


@pytest.mark.parametrize(
    ("error", "status", "is_worth_a_retry"),
    [
        (RejectedError("x"), 400, False),
        (OverloadedError("x"), 503, True),
        (DrainingError("x"), 503, True),
        (PeerError("x"), 502, False),
        (InvariantError("x"), 500, False),
    ],
)
def test_each_error_has_its_status_and_says_whether_to_send_again(error, status, is_worth_a_retry):
    answer = refusal(error)
    assert answer.status == status
    assert answer.headers["X-Should-Retry"] == ("true" if is_worth_a_retry else "false")
    assert ("Retry-After" in answer.headers) == is_worth_a_retry
    assert msgspec.json.decode(answer.body)["error"]["message"] == "x"


def test_the_last_event_of_a_broken_stream_is_an_error_in_openais_form():
    content = msgspec.json.decode(error_event("i0 broke off")[len("data: ") :])
    assert content["error"]["message"] == "i0 broke off"

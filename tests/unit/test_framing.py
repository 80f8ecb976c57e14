import pytest
from hypothesis import given
from hypothesis import strategies as st

from libra.errors import PeerError
from libra.wire.framing import FrameDecoder, encode_frame


@given(payloads=st.lists(st.binary(max_size=40)), cuts=st.lists(st.integers(0, 60)))
def test_frames_survive_any_way_of_cutting_the_stream(payloads, cuts):
    stream = b"".join(encode_frame(p) for p in payloads)
    decoder, seen, at = FrameDecoder(), [], 0
    for cut in [*cuts, len(stream)]:
        seen += decoder.feed(stream[at : at + cut])
        at = min(len(stream), at + cut)
    seen += decoder.feed(stream[at:])
    assert seen == payloads
    assert decoder.is_empty


def test_an_impossible_length_is_refused_before_it_is_buffered():
    with pytest.raises(PeerError, match="announced a frame"):
        FrameDecoder(max_frame_bytes=10).feed((11).to_bytes(4, "big"))


def test_half_a_frame_is_not_a_clean_end():
    decoder = FrameDecoder()
    decoder.feed(encode_frame(b"abc")[:-1])
    assert not decoder.is_empty

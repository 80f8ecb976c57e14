"""Version spans written into vLLM's answers, without rebuilding what is not touched."""

import msgspec

from libra.errors import InvariantError
from libra.serving.answer_record import AnswerRecord
from libra.wire.instance import SPANS_FIELD, VersionSpan

EVENT_END = b"\n\n"
DATA = b"data: "

# vLLM's chunks are compact JSON; a quote inside a string would be escaped, so this is the key.
FINISHED = b'"finish_reason":"'


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None


NO_ANSWER = b"null"
"""vLLM's body for a client that left before its answer was there."""


class Stamped(msgspec.Struct, frozen=True):
    content: bytes
    versions: tuple[int, ...]
    """Distinct, in the order of their tokens."""


async def stamp_body(content: bytes, record: AnswerRecord) -> Stamped:
    """Give every finished choice of one JSON object its spans.

    Raises RefusedError when weights that failed their proof had a part in it.
    """
    if content == NO_ANSWER:
        return Stamped(content, ())
    body = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    if "choices" not in body:
        raise InvariantError("vLLM answered a completion without choices")
    versions: dict[int, None] = {}
    choices: list[bytes] = []
    for raw in msgspec.json.decode(body["choices"], type=list[msgspec.Raw]):
        choice = msgspec.json.decode(raw, type=_Choice)
        if choice.finish_reason is None:
            choices.append(bytes(raw))
            continue
        spans = await record.spans(choice.index)
        versions |= dict.fromkeys(span.policy_version for span in spans)
        choices.append(_with_spans(bytes(raw), spans))
    parts = (
        msgspec.json.encode(key)
        + b":"
        + (b"[" + b",".join(choices) + b"]" if key == "choices" else bytes(value))
        for key, value in body.items()
    )
    return Stamped(b"{" + b",".join(parts) + b"}", tuple(versions))


async def stamp_events(chunk: bytes, record: AnswerRecord) -> bytes:
    """Give the finished choices in a piece of a server-sent event stream their spans.

    A piece holds whole events: vLLM sends each in one message.
    """
    if FINISHED not in chunk:
        return chunk
    events = []
    for event in chunk.split(EVENT_END):
        is_last_of_choice = event.startswith(DATA) and FINISHED in event
        if is_last_of_choice:
            stamped = await stamp_body(event[len(DATA) :], record)
            events.append(DATA + stamped.content)
        else:
            events.append(event)
    return EVENT_END.join(events)


def _with_spans(choice: bytes, spans: list[VersionSpan]) -> bytes:
    field = msgspec.json.encode(SPANS_FIELD) + b":" + msgspec.json.encode(spans)
    return choice.rstrip()[:-1] + b"," + field + b"}"

"""The official client against the gateway."""

import openai
import pytest

from fake_upstream import FakeUpstream
from gateways import running_gateway

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def anyio_backend():
    return "asyncio"


def client_of(gateway, **options):
    return openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="unused", **options)


async def test_completions_chat_streams_and_models():
    async with (
        FakeUpstream() as engine,
        running_gateway(engine) as gateway,
        client_of(gateway) as client,
    ):
        (model,) = (await client.models.list()).data
        whole = await client.completions.create(model=model.id, prompt=[1, 2, 3], max_tokens=5)
        assert whole.choices[0].text == "t0 t1 t2 t3 t4 "
        assert whole.usage.completion_tokens == 5
        chat = await client.chat.completions.create(model=model.id, messages=MESSAGES)
        assert chat.choices[0].message.content == "t0 t1 t2 t3 t4 "
        text = ""
        stream = await client.chat.completions.create(
            model=model.id, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(c.delta.content for c in chunk.choices)
        assert text == "t0 t1 t2 t3 t4 "


async def test_extra_fields_and_headers_go_through_both_ways():
    async with (
        FakeUpstream() as engine,
        running_gateway(engine, prefix_affinity=True) as gateway,
        client_of(gateway) as client,
    ):
        raw = await client.completions.with_raw_response.create(
            model="policy",
            prompt=[1, 2, 3],
            max_tokens=5,
            extra_body={"return_token_ids": True},
            extra_headers={"X-Libra-Prompt-Id": "p1"},
        )
        assert raw.headers["X-Libra-Instance"] == "i0"
        assert raw.headers["X-Libra-Policy-Version"] == "0"
        assert b'"return_token_ids":true' in engine.bodies[0].replace(b" ", b"")
        choice = raw.parse().choices[0]
        assert choice.token_ids == [0, 1, 2, 3, 4]
        assert choice.prompt_token_ids == [1, 2, 3]
        assert gateway.scheduler.affinity_counts.num_new == 1


@pytest.mark.case("R-B40")
async def test_the_client_does_not_repeat_what_an_engine_has_worked_on():
    async with (
        FakeUpstream() as engine,
        running_gateway(engine) as gateway,
        client_of(gateway, max_retries=5) as client,
    ):
        engine.refuses_always = 500
        with pytest.raises(openai.InternalServerError, match="i0 answered 500"):
            await client.completions.create(model="policy", prompt=[1], max_tokens=5)
        assert len(engine.bodies) == 1


async def test_the_client_repeats_what_found_no_place():
    async with (
        FakeUpstream() as engine,
        running_gateway(engine, queue_deadline_s=0.2) as gateway,
        client_of(gateway, max_retries=1) as client,
    ):
        engine.next_statuses.append(503)
        answer = await client.completions.create(model="policy", prompt=[1], max_tokens=5)
        assert answer.usage.completion_tokens == 5
        assert len(engine.bodies) == 2


@pytest.mark.case("R-B38")
async def test_a_broken_stream_raises_with_its_reason():
    async with (
        FakeUpstream() as engine,
        running_gateway(engine) as gateway,
        client_of(gateway) as client,
    ):
        engine.reset_after_tokens = 2
        stream = await client.completions.create(
            model="policy", prompt=[1], max_tokens=5, stream=True
        )
        seen = []

        async def read():
            async for chunk in stream:
                seen.append(chunk.choices[0].text)  # noqa: PERF401 - kept when it breaks

        with pytest.raises(openai.APIError, match="broke off its answer"):
            await read()
        assert seen == ["t0 ", "t1 "]

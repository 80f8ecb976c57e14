"""The gateway and the scheduler over real vLLM servers on CPU."""

import sys
from contextlib import contextmanager
from random import Random

import aiohttp
import anyio
import openai
import pytest

from gateways import running_gateway
from libra import clock
from libra_supervisor.instances import request_watch
from libra_supervisor.instances.metrics import server_metrics
from tail import NARROW, NUM_SAMPLES, STRATEGIES, WIDE, burst, output_lengths

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(500)]
ASK = {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 8, "seed": 3, "logprobs": 0,
       "return_token_ids": True}  # fmt: skip

MESSAGE = {"role": "user", "content": "hello"}


async def metrics_of(server):
    async with server.client() as client:
        text = await client.metrics_text(timeout_s=10.0)
    return server_metrics(text, incarnation="first", sampled_at=clock.now()).load


async def test_an_answer_through_the_gateway_equals_the_engines_own(servers):
    async with running_gateway(servers[0]) as gateway, aiohttp.ClientSession() as session:
        async with session.post(servers[0].url + "/v1/completions", json=ASK) as answer:
            direct = await answer.json()
        status, headers, through = await gateway.post(ASK)
        assert status == 200
        assert through["choices"] == direct["choices"]
        assert through["usage"] == direct["usage"]
        assert headers["X-Libra-Instance"] == "i0"
        assert gateway.scheduler.expected_output_tokens() == {"gateway /v1/completions": 8.0}


async def test_the_official_client_streams_chats_and_lists(servers):
    async with (
        running_gateway(servers[0]) as gateway,
        openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="unused") as client,
    ):
        assert [model.id for model in (await client.models.list()).data] == ["policy"]
        stream = await client.completions.create(
            model="policy", prompt=[5, 6, 7], max_tokens=8, seed=3, stream=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        token_ids = [t async for chunk in stream for t in chunk.choices[0].token_ids]
        whole = await client.completions.create(
            model="policy", prompt=[5, 6, 7], max_tokens=8, seed=3,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        assert token_ids == whole.choices[0].token_ids
        chat = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hello"}], max_tokens=5
        )
        assert chat.usage.completion_tokens <= 5
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await client.completions.create(model="policy", prompt=[5] * 3000, max_tokens=5)
        assert gateway.scheduler.take_notices() == ()
        assert gateway.scheduler.num_in_flight() == 0


@pytest.mark.case("R-B14")
async def test_an_engine_stops_generating_when_the_client_leaves(servers):
    async with running_gateway(servers[0]) as gateway:
        ask = ASK | {"max_tokens": 1900, "stream": True, "ignore_eos": True}
        async with gateway.client.post(gateway.url + "/v1/completions", json=ask) as answer:
            for _ in range(5):
                await answer.content.readuntil(b"\n\n")
            assert (await metrics_of(servers[0])).num_running == 1
            answer.close()
        with anyio.fail_after(5):
            while (await metrics_of(servers[0])).num_running:
                await clock.sleep(0.05)
        assert gateway.scheduler.num_in_flight() == 0


@pytest.mark.case("T-B77")
async def test_an_engine_tells_by_name_which_requests_of_clients_it_works_on(servers, monkeypatch):
    monkeypatch.setattr(request_watch, "PERIOD_S", 0.1)
    watch, told = request_watch.RequestWatch(rng=Random(1)), []

    @contextmanager
    def patience_with(_instance_id, request_id):
        with watch.hearing(request_id, lambda num_tokens: told.append((request_id, num_tokens))):
            yield

    whole = {"model": "policy", "max_tokens": 1900, "ignore_eos": True}
    async with (
        servers[0].client() as client,
        running_gateway(servers[0], patience_with=patience_with) as gateway,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(watch.run, client)
        for name, path, body in (
            ("mine", "/v1/completions", whole | {"prompt": [5, 6, 7]}),
            ("", "/v1/completions", whole | {"prompt": [[5, 6], [7, 8]], "n": 2}),
            ("chat", "/v1/chat/completions", whole | {"messages": [MESSAGE], "max_tokens": 1500}),
        ):
            told.clear()
            status, _, _ = await gateway.post(body, path=path, X_Request_Id=name)
            assert status == 200
            assert {heard for heard, _ in told} == {name or "gateway-1"}
            assert max(num_tokens for _, num_tokens in told) > 0
        tasks.cancel_scope.cancel()


async def test_vllm_bench_serve_runs_against_the_gateway(servers, tokenizer):
    async with running_gateway(*servers) as gateway:
        argv = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve",
            "--backend", "openai", "--base-url", gateway.url, "--model", "policy",
            "--tokenizer", str(tokenizer), "--dataset-name", "random", "--num-prompts", "24",
            "--random-input-len", "32", "--random-output-len", "16", "--ignore-eos",
            "--disable-tqdm",
        ]  # fmt: skip
        done = await anyio.run_process(argv, check=False)
        said = done.stdout.decode()
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        assert "Successful requests:                     24" in said, said
        assert gateway.scheduler.num_in_flight() == 0


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_kv_tokens_with_feedback_spare_the_server_that_has_little_room(servers):
    bursts = {
        name: await burst(servers, output_lengths=output_lengths(), seed=k, **options)
        for k, (name, options) in enumerate(STRATEGIES.items())
    }
    print(bursts)
    blind, by_room = bursts["round_robin"], bursts["kv_tokens"]
    assert blind.num_samples == {WIDE: NUM_SAMPLES // 2, NARROW: NUM_SAMPLES // 2}
    for found in bursts.values():
        assert sum(found.num_samples.values()) == NUM_SAMPLES
    # Blind to room, both pile up on the narrow server many times what it can hold, and it preempts.
    for name in ("round_robin", "requests"):
        assert bursts[name].most_reserved_fraction[NARROW] > 3
        assert bursts[name].num_preemptions[NARROW] > 0
    assert by_room.num_samples.get(NARROW, 0) < NUM_SAMPLES // 4
    assert by_room.most_reserved_fraction[NARROW] < blind.most_reserved_fraction[NARROW] / 3
    assert by_room.num_preemptions[NARROW] < blind.num_preemptions[NARROW] / 2
    assert by_room.num_preemptions[WIDE] == 0

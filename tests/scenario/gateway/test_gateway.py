"""The gateway over fake engines on real sockets."""

import socket
import statistics
from contextlib import AsyncExitStack

import anyio
import msgspec
import pytest

from fake_upstream import FakeUpstream
from fleets import place, spec
from gateways import eventually, running_gateway
from libra import clock
from libra.ids import InstanceId, PolicyVersion
from libra_supervisor.gateway.upstream import PhaseLimits

pytestmark = pytest.mark.anyio
ASK = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 5, "vllm_xargs": {"a": 1}}
STREAM = ASK | {"stream": True}


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_body_and_answer_pass_through_untouched_and_stamped():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        gateway.scheduler.set_version(InstanceId("i0"), PolicyVersion(3), clock.now())
        status, headers, answer = await gateway.post(ASK, X_Request_Id="roll-42")
        assert status == 200
        assert answer == engine._whole(is_chat=False)
        assert msgspec.json.decode(engine.bodies[0]) == ASK
        assert engine.headers[0]["X-Request-Id"] == "roll-42"
        assert headers["X-Libra-Instance"] == "i0"
        assert headers["X-Libra-Policy-Version"] == "3"
        assert headers["X-Libra-Policy-Versions"] == "3"
        assert gateway.scheduler.num_in_flight() == 0
        assert gateway.scheduler.expected_output_tokens() == {"gateway /v1/completions": 5.0}


async def test_a_stream_passes_event_by_event():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.token_delay_s = 0.05
        began, arrived = clock.now(), []
        async with gateway.client.post(gateway.url + "/v1/completions", json=STREAM) as answer:
            assert answer.headers["X-Libra-Policy-Version"] == "0"
            content = b""
            while piece := await answer.content.readany():
                arrived.append(clock.now() - began)
                content += piece
        events = content.split(b"\n\n")
        assert msgspec.json.decode(events[0][6:])["choices"][0]["token_ids"] == [0]
        assert events[-2:] == [b"data: [DONE]", b""]
        assert arrived[0] < 0.04 + arrived[-1] / 2
        assert gateway.scheduler.num_in_flight() == 0
        assert gateway.scheduler.expected_output_tokens() == {"gateway /v1/completions": 5.0}


async def test_a_streams_tokens_are_counted_by_events_when_it_tells_no_usage():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.tells_usage, engine.num_tokens = False, 7
        async with gateway.client.post(gateway.url + "/v1/completions", json=STREAM) as answer:
            await answer.read()
        assert gateway.scheduler.expected_output_tokens() == {"gateway /v1/completions": 7.0}


async def test_models_are_listed_without_any_engine():
    async with running_gateway() as gateway, gateway.client.get(gateway.url + "/v1/models") as a:
        (model,) = (await a.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("policy", 4096)


async def test_siblings_with_a_prompt_id_go_to_one_instance():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(3)]
        gateway = await stack.enter_async_context(running_gateway(*engines, prefix_affinity=True))
        for prompt in ("a", "b", "c"):
            seen = set()
            for _ in range(4):
                _, headers, _ = await gateway.post(ASK, X_Libra_Prompt_Id=prompt)
                seen.add(headers["X-Libra-Instance"])
            assert len(seen) == 1


async def test_a_request_for_a_newer_version_waits_until_it_is_there():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        seen = []

        async def ask():
            seen.append(await gateway.post(ASK, X_Libra_Min_Version="2"))

        async with anyio.create_task_group() as tg:
            tg.start_soon(ask)
            await eventually(lambda: gateway.scheduler.num_waiting == 1)
            gateway.scheduler.set_version(InstanceId("i0"), PolicyVersion(2), clock.now())
        ((status, headers, _),) = seen
        assert (status, headers["X-Libra-Policy-Version"]) == (200, "2")


@pytest.mark.case("R-B08")
async def test_bad_requests_never_count_against_an_instance():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.refuses_always, engine.message = 400, "prompt is too long"
        for _ in range(50):
            status, _, answer = await gateway.post(ASK)
            assert (status, answer["error"]["message"]) == (400, "prompt is too long")
        engine.refuses_always = None
        assert (await gateway.post(ASK))[0] == 200
        assert gateway.scheduler.take_notices() == ()


async def test_a_400_over_nan_logits_is_the_engines_fault():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.next_statuses.append(400)
        engine.message = "Out of range float values are not JSON compliant"
        status, headers, _ = await gateway.post(ASK)
        assert (status, headers["X-Should-Retry"]) == (502, "false")


@pytest.mark.case("R-B09")
async def test_a_full_engine_is_left_alone_for_a_moment_and_used_again_at_once_afterwards():
    async with AsyncExitStack() as stack:
        full, free = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(full, free))
        full.refuses_always, full.retry_after = 429, "1"
        for _ in range(20):
            status, headers, _ = await gateway.post(ASK)
            assert (status, headers["X-Libra-Instance"]) == (200, "i1")
        assert len(full.bodies) <= 2
        full.refuses_always = None
        await clock.sleep(1.05)
        seen = {(await gateway.post(ASK))[1]["X-Libra-Instance"] for _ in range(4)}
        assert seen == {"i0", "i1"}
        assert gateway.scheduler.take_notices() == ()


@pytest.mark.case("R-B09")
async def test_when_all_engines_are_full_requests_wait_and_none_fails():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(*engines))
        for engine in engines:
            engine.max_running, engine.token_delay_s = 2, 0.01
        statuses = []
        async with anyio.create_task_group() as tg:

            async def ask():
                statuses.append((await gateway.post(ASK))[0])

            for _ in range(16):
                tg.start_soon(ask)
        assert statuses == [200] * 16


@pytest.mark.case("R-B14")
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine_within_100_ms(is_stream):
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.token_delay_s, engine.num_tokens = 0.02, 1000
        delays = []
        for k in range(5):
            left_at = await leave_after_a_while(gateway, is_stream=is_stream)
            await eventually(lambda k=k: len(engine.cut_at) > k)
            delays.append(engine.cut_at[k] - left_at)
        assert statistics.median(delays) < 0.1
        await eventually(lambda: gateway.scheduler.num_in_flight() == 0)
        assert gateway.scheduler.take_notices() == ()


async def leave_after_a_while(gateway, *, is_stream):
    """When the client went away: after five tokens of a stream, else while it waits."""
    asking = gateway.client.post(gateway.url + "/v1/completions", json=STREAM if is_stream else ASK)
    if not is_stream:
        with anyio.move_on_after(0.2):
            await asking
        return clock.now()
    response = await asking
    for _ in range(5):
        await response.content.readuntil(b"\n\n")
    response.close()
    return clock.now()


async def test_a_client_that_leaves_the_queue_is_forgotten():
    async with running_gateway() as gateway:
        with anyio.move_on_after(0.2):
            await gateway.post(ASK)
        await eventually(lambda: gateway.scheduler.num_waiting == 0)


@pytest.mark.case("R-B26")
async def test_waiting_in_vain_ends_in_503_with_the_reason():
    async with running_gateway(queue_deadline_s=0.3) as gateway:
        status, headers, answer = await gateway.post(ASK)
        assert status == 503
        assert headers["Retry-After"] == "1"
        assert "no_instances" in answer["error"]["message"]


@pytest.mark.case("R-B38")
async def test_a_broken_stream_ends_with_a_reason_and_is_not_tried_again():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(*engines))
        for engine in engines:
            engine.reset_after_tokens = 3
        async with gateway.client.post(gateway.url + "/v1/completions", json=STREAM) as answer:
            content = await answer.read()
        events = content.split(b"\n\n")[:-1]
        assert len(events) == 4
        assert "broke off its answer" in msgspec.json.decode(events[3][6:])["error"]["message"]
        assert sum(len(engine.bodies) for engine in engines) == 1
        assert gateway.scheduler.num_in_flight() == 0


@pytest.mark.case("R-B40")
async def test_a_death_in_the_middle_of_an_answer_is_502_and_not_worth_a_retry():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.is_hanging = True
        async with anyio.create_task_group() as tg:

            async def ask():
                status, headers, answer = await gateway.post(ASK)
                assert (status, headers["X-Should-Retry"]) == (502, "false")
                assert "i0" in answer["error"]["message"]

            tg.start_soon(ask)
            await eventually(lambda: engine.num_running == 1)
            await engine.die()


async def test_an_error_inside_a_stream_counts_against_the_instance():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.error_after_tokens = 2
        for _ in range(3):
            async with gateway.client.post(gateway.url + "/v1/completions", json=STREAM) as answer:
                assert b"by switch" in await answer.read()
        assert [type(n).__name__ for n in gateway.scheduler.take_notices()] == ["BreakerOpened"]


@pytest.mark.case("R-B13")
async def test_a_hung_engine_costs_its_own_requests_only():
    limits = PhaseLimits(first_byte_s=2.0)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(*engines, limits=limits))
        engines[0].is_hanging = True
        engines[1].token_delay_s = 0.01
        times = {200: [], 502: []}
        async with anyio.create_task_group() as tg:

            async def ask():
                began = clock.now()
                status, _, _ = await gateway.post(ASK)
                times[status].append(clock.now() - began)

            for _ in range(20):
                tg.start_soon(ask)
        assert (len(times[200]), len(times[502])) == (10, 10)
        assert max(times[200]) < 2.0 <= min(times[502])
        # Its breaker is open now: nobody else is sent there.
        for _ in range(5):
            assert (await gateway.post(ASK))[1]["X-Libra-Instance"] == "i1"


@pytest.mark.case("R-B13")
async def test_an_engine_that_falls_silent_within_a_stream_is_cut_at_the_idle_limit():
    limits = PhaseLimits(idle_s=0.3)
    async with FakeUpstream() as engine, running_gateway(engine, limits=limits) as gateway:
        engine.hang_after_tokens = 2
        began = clock.now()
        async with gateway.client.post(gateway.url + "/v1/completions", json=STREAM) as answer:
            content = await answer.read()
        assert b"was silent for 0.3 s" in content
        assert clock.now() - began < 5.0
        await eventually(lambda: engine.num_running == 0)


@pytest.mark.case("R-B34")
async def test_connections_that_the_engine_closes_when_idle_cost_no_request():
    engine = FakeUpstream()
    engine.idle_close_s = 0.2
    async with engine, running_gateway(engine) as gateway:
        for pause_s in (0.195, 0.2, 0.205) * 4:
            assert (await gateway.post(ASK))[0] == 200
            await clock.sleep(pause_s)
        assert engine.num_served == 12


@pytest.mark.case("R-B41")
async def test_a_dead_instance_fails_no_request_while_another_can_take_it():
    async with AsyncExitStack() as stack:
        dead, alive = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(dead, alive))
        await dead.die()
        for _ in range(20):
            status, headers, _ = await gateway.post(ASK)
            assert (status, headers["X-Libra-Instance"]) == (200, "i1")


@pytest.mark.case("R-B36")
async def test_proxy_variables_are_ignored(monkeypatch):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        assert (await gateway.post(ASK))[0] == 200


@pytest.mark.skipif(not socket.has_ipv6, reason="this kernel has no IPv6")
async def test_both_sides_speak_ipv6():
    async with FakeUpstream(host="::1") as engine, running_gateway(engine, host="::1") as gateway:
        assert (await gateway.post(ASK))[0] == 200


async def test_a_stranger_on_an_instances_port_is_not_believed():
    async with FakeUpstream("somebody") as stranger:
        async with running_gateway(stranger) as gateway:
            pass
        stranger.name = "i0"
        async with running_gateway(stranger) as gateway:
            stranger.name = "somebody"
            status, _, answer = await gateway.post(ASK)
            assert status == 502
            assert "is somebody and not i0" in answer["error"]["message"]


async def test_an_engine_that_tells_no_name_is_served_too():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.tells_name = False
        status, headers, _ = await gateway.post(ASK)
        assert (status, headers["X-Libra-Instance"]) == (200, "i0")


async def test_the_clients_token_is_not_shown_to_engines():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        await gateway.post(ASK, Authorization="Bearer secret", Cookie="a=b")
        assert not {"Authorization", "Cookie"} & {name.title() for name in engine.headers[0]}


@pytest.mark.case("R-B01")
async def test_in_flight_equals_the_open_requests_while_health_and_discovery_go_on():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(*engines))
        for engine in engines:
            engine.num_tokens, engine.token_delay_s = 20, 0.02
        scheduler = gateway.scheduler
        async with anyio.create_task_group() as tg:

            async def ask():
                path = gateway.url + "/v1/completions"
                async with gateway.client.post(path, json=STREAM) as answer:
                    await answer.read()

            for _ in range(40):
                tg.start_soon(ask)
            await eventually(lambda: sum(e.num_running for e in engines) == 40)
            for cycle in range(3):
                for engine in engines:
                    scheduler.set_ready(InstanceId(engine.name), cycle % 2 == 0, clock.now())
                    scheduler.observe_instance(spec(engine.name), clock.now())
                    assert scheduler.num_in_flight(InstanceId(engine.name)) == engine.num_running
        assert scheduler.num_in_flight() == 0


@pytest.mark.case("R-B15")
async def test_the_table_is_empty_after_mixed_errors_cancels_and_timeouts():
    limits = PhaseLimits(first_byte_s=0.2, idle_s=0.2)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(4)]
        gateway = await stack.enter_async_context(running_gateway(*engines, limits=limits))
        engines[0].reset_after_tokens = 2
        engines[1].hang_after_tokens = 2
        engines[2].token_delay_s = 0.02

        async def ask(k):
            engines[3].next_statuses.append((400, 429, 500, 503, 408)[k % 5])
            path = gateway.url + "/v1/completions"
            with anyio.move_on_after(0.01 * (k % 7)):
                async with gateway.client.post(path, json=STREAM if k % 2 else ASK) as answer:
                    await answer.read()

        for _ in range(8):
            async with anyio.create_task_group() as tg:
                for k in range(50):
                    tg.start_soon(ask, k)
        await eventually(lambda: gateway.scheduler.num_in_flight() == 0)
        await eventually(lambda: gateway.scheduler.num_waiting == 0)
        assert gateway.scheduler.num_repeated_releases == 0


async def test_gateway_requests_and_our_own_share_one_ledger():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(running_gateway(*engines))
        own = place(gateway.scheduler, clock.now())
        _, headers, _ = await gateway.post(ASK)
        assert headers["X-Libra-Instance"] != own.instance_id


async def test_many_clients_that_leave_at_once_leave_nothing(caplog):
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        engine.token_delay_s, engine.num_tokens = 0.05, 1000
        async with anyio.create_task_group() as tg:

            async def ask():
                path = gateway.url + "/v1/completions"
                async with gateway.client.post(path, json=STREAM) as answer:
                    await answer.read()

            for _ in range(100):
                tg.start_soon(ask)
            await eventually(lambda: engine.num_running == 100)
            tg.cancel_scope.cancel()
        await eventually(lambda: engine.num_running == 0)
        await eventually(lambda: gateway.scheduler.num_in_flight() == 0)
    assert caplog.records == []


@pytest.mark.case("R-B41")
async def test_when_no_engine_can_be_reached_the_answer_says_so():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        await engine.die()
        status, _, answer = await gateway.post(ASK)
        assert status == 502
        assert "i0" in answer["error"]["message"]
        assert gateway.scheduler.num_in_flight() == 0


async def test_an_instance_that_vanished_between_placing_and_sending_costs_another_try():
    async with FakeUpstream() as engine, running_gateway(engine) as gateway:
        gateway.scheduler.observe_instance(spec("unheard-of"), clock.now())
        statuses = {(await gateway.post(ASK))[0] for _ in range(4)}
        assert statuses == {200}


@pytest.mark.case("R-B13")
async def test_an_engine_that_is_silent_on_a_reused_connection_is_not_asked_again():
    limits = PhaseLimits(first_byte_s=0.5)
    async with FakeUpstream() as engine, running_gateway(engine, limits=limits) as gateway:
        assert (await gateway.post(ASK))[0] == 200
        engine.is_hanging = True
        status, _, answer = await gateway.post(ASK)
        assert (status, len(engine.bodies)) == (502, 2)
        assert "was silent for 0.5 s" in answer["error"]["message"]


@pytest.mark.case("R-B34")
async def test_a_connection_lost_twice_is_not_tried_a_third_time():
    engine = FakeUpstream()
    async with engine, running_gateway(engine) as gateway:
        assert (await gateway.post(ASK))[0] == 200
        engine.drops_all = True
        status, headers, _ = await gateway.post(ASK)
        assert (status, headers["X-Should-Retry"]) == (502, "false")
        assert len(engine.bodies) == 3  # the pooled connection and one fresh one


@pytest.mark.case("R-B29")
async def test_streams_on_an_instance_that_is_drained_go_on_and_are_cut_with_a_reason():
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(FakeUpstream(f"i{k}")) for k in range(2)]
        gateway = await stack.enter_async_context(
            running_gateway(*engines, load_balance_strategy="round_robin")
        )
        leaving, staying = engines
        leaving.num_tokens, leaving.token_delay_s = 100_000, 0.01
        gateway.scheduler.set_ready(InstanceId("i1"), False, clock.now())
        begun, contents = [], []

        async def read_to_the_end():
            path = gateway.url + "/v1/completions"
            async with gateway.client.post(path, json=STREAM) as answer:
                begun.append(await answer.content.readuntil(b"\n\n"))
                contents.append(await answer.read())

        async with anyio.create_task_group() as tg:
            for _ in range(10):
                tg.start_soon(read_to_the_end)
            await eventually(lambda: len(begun) == 10)
            gateway.scheduler.set_ready(InstanceId("i1"), True, clock.now())
            gateway.scheduler.drain_instance(InstanceId("i0"), True, clock.now())
            for _ in range(5):
                assert (await gateway.post(ASK))[1]["X-Libra-Instance"] == "i1"
            assert (leaving.num_running, staying.num_served, contents) == (10, 5, [])
            # The deadline of the drain is over: the process is ended.
            await leaving.die()
        assert len(contents) == 10
        for content in contents:
            last = content.split(b"\n\n")[-2]
            assert "i0 broke off its answer" in msgspec.json.decode(last[6:])["error"]["message"]
        assert gateway.scheduler.num_in_flight() == 0

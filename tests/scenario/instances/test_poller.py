"""InstancePoller on virtual time, with a client that answers as it is told."""

from random import Random

import anyio
import pytest
import trio.testing

from fake_vllm import FakeVllm
from libra import clock
from libra.errors import OverloadedError, PeerError, RefusedError, RejectedError
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.poller import InstancePoller

PAGE = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:generation_tokens_total{engine="0"} 7\n'


@pytest.fixture
def anyio_backend():
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class ToldClient:
    instance_id = "vllm-0"

    def __init__(self, page=PAGE, *, answer_s=0.0):
        self.page, self.answer_s = page, answer_s
        self.health_error = None
        self.asked_at = []

    async def health(self):
        self.asked_at.append(clock.now())
        if self.health_error is not None:
            raise self.health_error

    async def metrics_text(self, *, timeout_s):
        if self.answer_s > timeout_s:
            await clock.sleep(timeout_s)
            raise PeerError("vllm-0 did not answer while giving its metrics")
        await clock.sleep(self.answer_s)
        return self.page


async def poll(client, *, for_s, seed=1, period_s=3.0, timeout_s=1.0, **how):
    seen = []
    poller = InstancePoller(
        client,
        "vllm-0#1",
        seen.append,
        period_s=period_s,
        timeout_s=timeout_s,
        rng=Random(seed),
        **how,
    )
    with anyio.move_on_after(for_s):
        await poller.run()
    return seen


@pytest.mark.anyio
async def test_every_look_gives_health_and_numbers():
    seen = await poll(ToldClient(), for_s=10.0)
    assert len(seen) in (3, 4)
    for polled in seen:
        assert (polled.instance_id, polled.incarnation) == ("vllm-0", "vllm-0#1")
        assert (polled.health, polled.error) == ("healthy", "")
        assert polled.metrics.load.num_running == 3.0
        assert polled.metrics.num_tokens == 7.0
        assert polled.metrics.load.sampled_at == polled.at


@pytest.mark.anyio
async def test_pollers_look_at_different_phases():
    first_looks = []
    for seed in range(20):
        client, began_at = ToldClient(), clock.now()
        await poll(client, for_s=3.5, seed=seed)
        first_looks.append(client.asked_at[0] - began_at)
    assert len({round(at, 3) for at in first_looks}) == 20
    assert max(first_looks) <= 3.0
    assert max(first_looks) - min(first_looks) > 1.5


@pytest.mark.anyio
@pytest.mark.case("R-B23")
async def test_a_page_that_hangs_gives_a_look_without_numbers_at_the_next_slots():
    client = ToldClient(answer_s=99.0)
    seen = await poll(client, for_s=12.0)
    assert len(seen) >= 3
    assert all(polled.metrics is None for polled in seen)
    assert all("giving its metrics" in polled.error for polled in seen)
    gaps = [b - a for a, b in zip(client.asked_at, client.asked_at[1:], strict=False)]
    assert gaps == pytest.approx([3.0] * len(gaps))


@pytest.mark.anyio
async def test_a_look_longer_than_the_period_skips_slots_instead_of_bunching():
    client = ToldClient(answer_s=7.0)
    await poll(client, for_s=40.0, timeout_s=8.0)
    gaps = [b - a for a, b in zip(client.asked_at, client.asked_at[1:], strict=False)]
    assert gaps == pytest.approx([9.0] * len(gaps))


@pytest.mark.anyio
async def test_a_dead_engine_and_a_silent_server_are_told_apart():
    client = ToldClient()
    client.health_error = OverloadedError("vllm-0 answered 503")
    assert (await poll(client, for_s=3.5))[0].health == "unhealthy"
    client.health_error = PeerError("vllm-0 did not answer")
    polled = (await poll(client, for_s=3.5))[0]
    assert (polled.health, polled.error) == ("no_answer", "vllm-0 did not answer")
    for odd in (RejectedError("vllm-0 answered 404"), RefusedError("vllm-0 answered 503")):
        client.health_error = odd
        assert (await poll(client, for_s=3.5))[0].health == "no_answer"


class TestAgainstAServer:
    @pytest.fixture
    def anyio_backend(self):
        return "asyncio"

    @pytest.mark.anyio
    async def test_a_real_page_is_polled_over_http(self):
        async with (
            FakeVllm() as server,
            InstanceClient("vllm-0", server.url, token=server.token) as client,
        ):
            server.kv_use_fraction = 0.5
            (polled, *_) = await poll(client, for_s=0.2, period_s=0.05)
            assert polled.metrics.load.kv_use_fraction == 0.5
            assert polled.metrics.load.kv_capacity_tokens == 1536
            server.health_status = 503
            assert (await poll(client, for_s=0.2, period_s=0.05))[0].health == "unhealthy"


@pytest.mark.anyio
async def test_of_a_server_that_has_no_load_health_alone_is_asked():
    client = ToldClient()
    has_load = iter([True, False, False, True])
    seen = await poll(client, for_s=10, has_load=lambda: next(has_load))
    assert [it.metrics is not None for it in seen] == [True, False, False, True][: len(seen)]
    assert [it.health for it in seen] == ["healthy"] * len(seen)
    assert {it.error for it in seen} == {""}
    assert len(seen) > 2

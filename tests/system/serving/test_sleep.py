"""A real vLLM server that sleeps and is woken up. On CPU it keeps its memory and only pauses."""

import pytest

from libra.errors import RefusedError
from libra.wire.instance import Sampling
from real_reloads import complete, reload, request_for

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(300)]

WITHIN_S = 60.0
LONG_PROMPT = [(7 * k) % 400 + 10 for k in range(300)]


async def test_a_server_that_slept_serves_again_once_it_has_loaded_a_version(a, versions):
    ack = await reload(a, versions, 1)
    before = await complete(a, LONG_PROMPT)
    await a.sleep(timeout_s=WITHIN_S)
    asleep = await a.state()
    assert (asleep.is_asleep, asleep.is_paused, asleep.policy_version) == (True, True, None)
    await a.health()  # its engine is there, and says so
    assert "vllm:cache_config_info" in await a.metrics_text(timeout_s=WITHIN_S)
    assert await a.open_requests() == {}
    with pytest.raises(RefusedError, match="/sleep was called"):
        await complete(a, LONG_PROMPT)
    refused = await a.reload(request_for(versions, 2), timeout_s=WITHIN_S)
    assert "sleeps" in (refused.error or "")
    await a.wake_up(timeout_s=WITHIN_S)
    woken = await a.state()
    assert (woken.is_asleep, woken.is_paused, woken.policy_version) == (False, False, None)
    with pytest.raises(RefusedError, match="/wake_up was called"):
        await a.complete([5, 6], Sampling(max_new_tokens=1), request_id="too-early")
    assert (await reload(a, versions, 1)).probe_logprobs == ack.probe_logprobs
    after = await complete(a, LONG_PROMPT)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert after.num_cached_tokens == 0, "what it knew of prompts went with its memory"


async def test_it_sleeps_and_wakes_more_than_once_and_twice_is_no_harm(a, versions):
    await reload(a, versions, 2)
    for version in (1, 2):
        for _ in range(2):
            await a.sleep(timeout_s=WITHIN_S)
        for _ in range(2):
            await a.wake_up(timeout_s=WITHIN_S)
        await reload(a, versions, version)
        assert (await complete(a)).version_spans[0].policy_version == version

"""What tests ask of a real server: to load a published version, and to answer."""

from libra.weights.judge import ack_problems
from libra.wire.instance import ReloadRequest, Sampling
from real_servers import RUN_ID

PROBE = (5, 6, 7, 8, 9, 10)
num_requests = iter(range(10**6))


def request_for(versions, version, **changes):
    directory, manifest_hash = versions[version]
    fields = {
        "run_id": RUN_ID,
        "policy_version": version,
        "nonce": f"nonce-{next(num_requests)}",
        "weights_directory": str(directory),
        "manifest_hash": manifest_hash,
        "pause_mode": "keep",
        "probe_token_ids": PROBE,
        "force": True,
    }
    return ReloadRequest(**fields | changes)


async def reload(client, versions, version, **changes):
    request = request_for(versions, version, **changes)
    ack = await client.reload(request, timeout_s=60.0)
    assert ack.error is None, ack.error
    assert ack_problems(request, ack) == ()
    return ack


async def complete(client, prompt=PROBE, *, max_new_tokens=24, seed=11):
    sampling = Sampling(max_new_tokens=max_new_tokens, seed=seed)
    return await client.complete(prompt, sampling, request_id=f"t-{next(num_requests)}")

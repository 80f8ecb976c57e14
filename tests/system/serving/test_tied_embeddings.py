"""Reloads of a model with tied embeddings: its checkpoint holds no LM head."""

import pytest

from libra.wire.instance import ReloadRequest
from real_servers import RUN_ID, RealServer, RunFiles

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(400)]

PROBE = (5, 6, 7, 8, 9, 10, 11, 12)


def logprobs_of(directory):
    """What transformers computes from the same files."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        rows = model(torch.tensor([PROBE])).logits.log_softmax(-1)[0]
    return [rows[i, token].item() for i, token in enumerate(PROBE[1:])]


async def test_a_reload_reaches_the_head_too(tmp_path):
    files = RunFiles(tmp_path, tied=True)
    versions = {version: files.publish(version) for version in (1, 2)}
    server = RealServer(files, "vllm-tied", core=0)
    try:
        await server.until_ready()
        async with server.client() as client:
            for version in (1, 2, 1):
                directory, manifest_hash = versions[version]
                request = ReloadRequest(
                    run_id=RUN_ID,
                    policy_version=version,
                    nonce=f"nonce-{version}",
                    weights_directory=str(directory),
                    manifest_hash=manifest_hash,
                    pause_mode="keep",
                    probe_token_ids=PROBE,
                    force=True,
                )
                ack = await client.reload(request, timeout_s=60.0)
                assert ack.error is None, ack.error
                assert ack.probe_logprobs == pytest.approx(logprobs_of(directory), abs=1e-4)
        assert server.terminate() == 0, server.last_lines()
    finally:
        server.kill()

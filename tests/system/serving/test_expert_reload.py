"""A server whose model has experts, which vLLM packs for the CPU, goes from version to version."""

import shutil

import anyio
import pytest
import torch

from real_reloads import PROBE, reload
from real_servers import RealServer, RunFiles
from tiny_models import make_tiny_model
from tiny_vllm_model import VOCABULARY

pytestmark = [pytest.mark.anyio, pytest.mark.system, pytest.mark.timeout(400)]

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def expert_files(files, tmp_path_factory):
    """Experts of 48 features, which vLLM pads: a copy of what is not packed does not even fit."""
    root = tmp_path_factory.mktemp("experts")
    changes = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048}
    base = make_tiny_model(root / "base", "qwen3_moe", **changes)
    for name in TOKENIZER:
        shutil.copy(files.base / name, base / name)
    return RunFiles(root, base=base)


def scored(directory):
    """Of the probe's tokens but the first, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([PROBE])).logits[0], -1)
    return [float(logprobs[at, token]) for at, token in enumerate(PROBE[1:])]


async def test_reloaded_experts_are_those_of_the_version(expert_files):
    versions = {version: expert_files.publish(version) for version in (1, 2)}
    server = RealServer(expert_files, "vllm-experts", core=0)
    try:
        await server.until_ready()
        async with server.client() as client:
            # The second has the first one's packed experts in its way.
            for version in (1, 2, 1):
                ack = await reload(client, versions, version)
                right = await anyio.to_thread.run_sync(scored, versions[version][0])
                assert ack.probe_logprobs == pytest.approx(right, abs=1e-4)
        assert server.terminate() == 0, server.last_lines()
        await server.until_gone()
    finally:
        server.kill()

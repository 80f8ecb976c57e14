"""LibraMiddleware around the fake engine, with weights to load, for tests in virtual time."""

from pathlib import Path

import msgspec
from safetensors.numpy import save_file

from fake_engine import FakeAsyncLLM, FakeCompletionsApp, request, sampling
from libra.serving.engine import VllmEngine
from libra.serving.gate import Gate
from libra.serving.ledger import VersionLedger
from libra.serving.middleware import GuardedServer, LibraMiddleware
from libra.wire.instance import ReloadAck, TransferTensor, WeightsTransfer
from reload_messages import reload_request
from weight_dirs import publish_weights, tiny_tensors

TOKEN = "the-run's-token"


class GuardedApp:
    """The middleware, the fake engine behind it, and published versions v1.."""

    def __init__(self, root: Path, monkeypatch, *, num_versions: int = 3) -> None:
        base = root / "base"
        base.mkdir()
        save_file(tiny_tensors(0), base / "model.safetensors")
        self.weights_directory = root / "weights"
        (root / "token").write_text(TOKEN + "\n")
        self.environment = {
            "LIBRA_INSTANCE_ID": "vllm-0",
            "LIBRA_INCARNATION": "vllm-0-a",
            "LIBRA_RUN_ID": "run-1",
            "LIBRA_WEIGHTS_DIR": str(self.weights_directory),
            "LIBRA_TOKEN_FILE": str(root / "token"),
        }
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        self.published = {
            version: publish_weights(self.weights_directory, version)
            for version in range(1, num_versions + 1)
        }
        self.engine = FakeAsyncLLM(base)
        self._num_transfers = 0
        self.inner = FakeCompletionsApp(self.engine)
        self.middleware = LibraMiddleware(self.inner, guard=self._guard)

    def _guard(self, identity, client) -> GuardedServer:
        gate, ledger = Gate(), VersionLedger(identity.served_version)

        def probe_sampling():
            return sampling(max_tokens=1, prompt_logprobs=0)

        engine = VllmEngine(client, gate, ledger, probe_sampling=probe_sampling)
        return GuardedServer(identity, engine, gate, ledger)

    async def __call__(self, scope, receive, send):
        await self.middleware(scope, receive, send)

    async def call(self, method, path, **how):
        return await request(self, method, path, **how)

    async def complete(self, *, max_tokens=20, path="/v1/completions", request_id=None, **body):
        body = {"prompts": [[1, 2, 3]], "max_tokens": max_tokens} | body
        return await self.call("POST", path, body=msgspec.json.encode(body), request_id=request_id)

    async def open_requests(self):
        answer = await self.call("GET", "/libra/requests", token=TOKEN)
        assert answer.status == 200, answer.body
        return answer.json["num_tokens"]

    def request_for(self, version, **changes):
        directory, manifest_hash = self.published[version]
        request = reload_request(
            policy_version=version, weights_directory=str(directory), manifest_hash=manifest_hash
        )
        return msgspec.structs.replace(request, **changes)

    async def reload(self, version, **changes) -> ReloadAck:
        body = msgspec.json.encode(self.request_for(version, **changes))
        answer = await self.call("POST", "/libra/reload", body=body, token=TOKEN)
        assert answer.status == 200, answer.body
        return msgspec.json.decode(answer.body, type=ReloadAck)

    def transfer_for(self, version, *, group_id="group-1", **changes):
        self._num_transfers += 1
        tensors = tuple(
            TransferTensor(name, "F32", tensor.shape) for name, tensor in tiny_tensors(0).items()
        )
        transfer = WeightsTransfer(
            group_id=group_id,
            store_host="127.0.0.1",
            store_port=1,
            world_size=3,
            rank_offset_of={"vllm-9": 1, "vllm-0": 2},
            tied_embeddings=False,
            tensors=tensors,
            bucket_bytes=1024,
            timeout_s=60.0,
            stall_s=20.0,
        )
        return reload_request(
            policy_version=version,
            nonce=f"v{version}-{self._num_transfers}",
            weights_directory="",
            manifest_hash=f"offer-{version}",
            transfer=msgspec.structs.replace(transfer, **changes),
        )

    async def receive(self, request) -> ReloadAck:
        body = msgspec.json.encode(request)
        answer = await self.call("POST", "/libra/reload", body=body, token=TOKEN)
        assert answer.status == 200, answer.body
        return msgspec.json.decode(answer.body, type=ReloadAck)

    async def state(self):
        return (await self.call("GET", "/libra/state")).json

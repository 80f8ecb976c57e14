"""Reloads of real vLLM servers, supervised as in a run, for bench_reload.py."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Self

import anyio
import msgspec
from reload_bed import PROBE, RUN, Batch, Bed

from libra import clock
from libra.config.load import current_environ, load_config
from libra.config.run import RunConfig
from libra.ids import InstanceId, PolicyVersion, RequestId
from libra.planner.plan import InstancePlacement, configured_plan
from libra.rollouts.trajectory import Completion
from libra.scheduling.scheduler import Scheduler
from libra.storage.safetensors import model_tensors
from libra.wire.instance import Sampling, TransferTensor
from libra.wire.rank import OfferWeights, SendWeights, WeightsOffered, WeightsSent
from libra_supervisor.app.drain_watch import DrainWatch
from libra_supervisor.app.engine import Engine, EngineSite
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.instances.client import InstanceClient
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.process.kernel import Linux
from libra_supervisor.process.lifecycle import ChildState
from libra_supervisor.process.logs import LogPolicy, open_log_relay
from libra_supervisor.process.spawn import LinuxSpawner, become_subreaper
from weight_dirs import describe_version

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIG = ROOT / "configs" / "quickstart.yaml"
METHODS, STRATEGIES = ("inplace", "transfer", "restart"), ("parallel", "serial")
STREAM = Sampling(max_new_tokens=480, seed=5)
RELOAD_AFTER_S = 0.2
POLL_S = 0.1


def real(
    model: Path, counts: Sequence[int], num_batches: int, only: str
) -> Iterator[tuple[str, dict[str, object]]]:
    """One result for each number of servers, method and strategy; all under one subreaper."""
    become_subreaper()
    for count in counts:
        for method in METHODS:
            has_choice = count > 1 and method != "transfer"
            for strategy in STRATEGIES if has_choice else STRATEGIES[:1]:
                case = f"{method}-{strategy}"
                if only in ("", case):
                    measured = anyio.run(
                        measure,
                        config_of(model, count, method, strategy),
                        # Starting a process takes a minute: two batches tell.
                        2 if method == "restart" else num_batches,
                        backend_options={"use_uvloop": True},
                    )
                    yield f"{count}-{case}", measured


def config_of(model: Path, count: int, method: str, strategy: str) -> RunConfig:
    overrides = (
        f"model_path={model.resolve()}",
        f"rollout_gpus={count}",
        f"heterogeneous_rollout.instances=[{{tp: 1, count: {count}}}]",
        "max_model_len=512",
        *(
            ("rollout_weight_sync_mode=nccl",)
            if method == "transfer"
            else (
                f"rollout_weight_reload_method={method}",
                f"rollout_weight_reload_strategy={strategy}",
            )
        ),
    )
    return load_config(CONFIG, overrides, current_environ(), purpose="plan").config


async def measure(config: RunConfig, num_batches: int) -> dict[str, object]:
    root = Path(tempfile.mkdtemp(prefix="libra-bench-"))
    try:
        async with ServerBed(config, root, num_batches) as bed:
            return await bed.measure()
    finally:
        shutil.rmtree(root)


class ServerBed(AsyncExitStack):
    """Servers of `config` on their way up, and a bed over them."""

    def __init__(self, config: RunConfig, root: Path, num_batches: int) -> None:
        super().__init__()
        self._config = config
        self._model = Path(config.model.model_path)
        self._root = root
        self._num_batches = num_batches
        self._ids: list[InstanceId] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        config, plan = self._config, configured_plan(self._config)
        self._ids = [placement.instance_id for placement in plan.instances]
        is_transfer = config.weights.rollout_weight_sync_mode == "nccl"
        self._bed = Bed(
            self._root,
            config.weights,
            [(placement.instance_id, placement.tp) for placement in plan.instances],
            self._publish,
            num_batches=self._num_batches,
            transfers=SenderOfFiles(self._model) if is_transfer else None,
        )
        environ, rng = current_environ(), Random(0)  # noqa: S311 - jitter and names
        environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'supervisor'}"
        token_file = self._root / "token"
        token_file.write_text("bench")
        logs = await self.enter_async_context(
            open_log_relay(
                self._root,
                run_id=RUN,
                env=environ,
                post=self._bed.inbox.post,
                policy=LogPolicy(max_bytes=1 << 24, num_kept=1),
            )
        )
        site = EngineSite(
            run_id=RUN,
            directory=self._bed.directory,
            config=config,
            device="cpu",
            host="127.0.0.1",
            token="bench",  # noqa: S106 - of servers that live a minute
            token_file=token_file,
            env=environ,
            devices=("0", "1"),
            meter=ServingMeter({p.instance_id: p.tp for p in plan.instances}),
        )
        scheduler = Scheduler(config.heterogeneous_rollout.scheduling)

        def make(placement: InstancePlacement, has_devices: bool) -> Engine:
            return Engine(
                site,
                placement,
                scheduler,
                port=0,
                served_directory=lambda: None,
                rng=rng,
                has_devices=has_devices,
            )

        self._fleet = Fleet(
            plan.instances,
            make=make,
            watch=DrainWatch(scheduler, WaitingRoom(scheduler), self._bed.inbox.post),
            config=config.supervision,
            spawner=LinuxSpawner(run_id=RUN, logs=logs, kernel=Linux(), cgroups=None),
            weights=config.weights,
            post=self._bed.inbox.post,
            rng=rng,
        )
        await self.enter_async_context(self._fleet)
        return self

    async def measure(self) -> dict[str, object]:
        async with anyio.create_task_group() as tasks:
            self._fleet.start(tasks, {})
            began_at = clock.now()
            while not all(map(self._is_up, self._ids)):
                await clock.sleep(POLL_S)
            up_s = clock.now() - began_at
            # The weights never change, so the engine's own answer is what a trainer would say.
            self._bed.probe_logprobs = await self._fleet.client_of(self._ids[0]).prompt_logprobs(
                PROBE, request_id=RequestId("bench-probe")
            )
            figures = figures_of(await self._bed.run(self._fleet))
            if self._bed.last_request.weights_directory and (
                self._config.weights.rollout_weight_reload_method == "inplace"
            ):
                figures["streams"] = await self._interrupted_streams()
            self._fleet.stop()
            await self._fleet.until_down()
            tasks.cancel_scope.cancel()
        return {"start_s": round(up_s, 1), **figures}

    def _is_up(self, instance_id: InstanceId) -> bool:
        return self._fleet.status_of(instance_id).state is ChildState.READY

    async def _interrupted_streams(self) -> dict[str, object]:
        """Reload every server in the middle of an answer; compare with unbroken ones."""
        request = msgspec.structs.replace(self._bed.last_request, nonce="streams", force=True)
        num_interrupted = num_same = 0
        for instance_id in self._ids:
            client = self._fleet.client_of(instance_id)
            unbroken = await client.complete(PROBE, STREAM, request_id=RequestId("unbroken"))
            broken: list[Completion] = []

            async def ask(client: InstanceClient, answers: list[Completion]) -> None:
                answers.append(
                    await client.complete(PROBE, STREAM, request_id=RequestId("interrupted"))
                )

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, client, broken)
                await clock.sleep(RELOAD_AFTER_S)
                ack = await self._fleet.reload(instance_id, request)
            if ack.error is not None:
                raise RuntimeError(ack.error)
            # One that had ended before the reload shows nothing.
            is_interrupted = len(broken[0].version_spans) > 1
            num_interrupted += is_interrupted
            num_same += is_interrupted and broken[0].token_ids == unbroken.token_ids
        return {"num_interrupted": num_interrupted, "num_token_identical": num_same}

    def _publish(self, directory: Path, version: PolicyVersion) -> str:
        shutil.copytree(self._model, directory)
        is_tied = msgspec.json.decode((directory / "config.json").read_bytes()).get(
            "tie_word_embeddings", False
        )
        return describe_version(directory, version, run_id=RUN, tied_embeddings=is_tied)


class SenderOfFiles:
    """`reload_bed.Transferring`: sends what lies in a directory, read anew each time."""

    def __init__(self, model: Path) -> None:
        # Only where weights are transferred: torch takes seconds.
        import torch  # noqa: PLC0415

        from libra.transfer.sender import Sender  # noqa: PLC0415

        self._model = model
        self._tensors = tuple(
            TransferTensor(it.name, it.dtype, it.shape) for it in model_tensors(model)
        )
        self._sender = Sender(
            torch.device("cpu"), beat=lambda: None, abort_reason=lambda _group: None
        )

    def offer(self, command: OfferWeights, probe_logprobs: tuple[float, ...]) -> WeightsOffered:
        config = msgspec.json.decode((self._model / "config.json").read_bytes())
        return WeightsOffered(
            policy_version=command.policy_version,
            offer_hash=f"offer-{command.policy_version}",
            tied_embeddings=config.get("tie_word_embeddings", False),
            tensors=self._tensors,
            store_host=self._sender.host,
            store_port=self._sender.port,
            probe_logprobs=probe_logprobs,
            offer_s=0.0,
        )

    def send(self, command: SendWeights) -> WeightsSent:
        began_at = clock.monotonic()
        checksums: list[str] = []
        self._sender.send(command.transfer, command.nonce, self._read, on_summed=checksums.append)
        return WeightsSent(
            policy_version=command.policy_version,
            nonce=command.nonce,
            checksum=checksums[0],
            num_bytes=sum(path.stat().st_size for path in self._model.glob("*.safetensors")),
            send_s=clock.monotonic() - began_at,
        )

    def _read(self) -> Iterator[tuple[str, "Tensor"]]:
        from safetensors import safe_open  # noqa: PLC0415

        files = {it.name: it.file for it in model_tensors(self._model)}
        for tensor in self._tensors:
            with safe_open(self._model / files[tensor.name], framework="pt") as opened:
                yield tensor.name, opened.get_tensor(tensor.name)


def figures_of(batches: list[Batch]) -> dict[str, object]:
    records = [batch.record for batch in batches]
    acks = [ack for record in records for ack in record.acks]
    return {
        "num_batches": len(records),
        "batch_s": [round(record.total_s, 3) for record in records],
        "slowest_s": [round(record.slowest_total_s, 3) for record in records],
        "median_of_acks_s": {
            name: round(median(getattr(ack, name) for ack in acks), 3)
            for name in ("lock_wait_s", "process_stop_s", "model_load_s", "total_s")
        },
        "probe_difference": max(record.probe_difference for record in records),
    }

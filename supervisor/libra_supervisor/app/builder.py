"""Builds the moving parts of a run: servers, gang, reward workers, runner, gateway."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from libra.data.dataset import PromptDataset
from libra.ids import ChildId, RunId
from libra.planner.plan import InstancePlacement
from libra.scheduling.scheduler import Scheduler
from libra.workflows.loading import load_workflow
from libra_supervisor.app.device_gate import DeviceGate
from libra_supervisor.app.engine import Engine, EngineSite
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.app.foreign import ForeignEngine
from libra_supervisor.app.launch import Launch
from libra_supervisor.app.parts import batch_shape
from libra_supervisor.app.prompts import Prompts
from libra_supervisor.app.rank_mail import CheckpointChooser
from libra_supervisor.app.routing import EngineRouter
from libra_supervisor.app.scoring import reward_pool_of
from libra_supervisor.events import Event
from libra_supervisor.gateway.gateway import Gateway, GatewayOptions
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.inbox import Inbox
from libra_supervisor.instances.client import MODEL_NAME
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.loop.execute import Terms
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.ranks.gang import Gang
from libra_supervisor.ranks.torchrun import TRAINER_ID, GangSite
from libra_supervisor.rewards.pool import RewardPool
from libra_supervisor.rollouts.client import GenerationSettings
from libra_supervisor.rollouts.runner import RolloutRunner, RunnerParts
from libra_supervisor.shared_load.directory import SharedDirectory
from libra_supervisor.shared_load.exchange import LoadExchange

LOOPBACK: Final = "127.0.0.1"


class Builder(msgspec.Struct, frozen=True, kw_only=True):
    """What all parts of one run share. Each method makes one part and starts nothing."""

    launch: Launch
    prompts: Prompts
    run_id: RunId
    token: str
    token_file: Path
    spawner: Spawner
    scheduler: Scheduler
    room: WaitingRoom
    inbox: Inbox[Event]
    rng: Random
    meter: ServingMeter

    def terms(self) -> Terms:
        config = self.launch.config
        return Terms(
            run_id=self.run_id,
            directory=self.launch.directory,
            algorithm=config.algorithm,
            shape=batch_shape(config, self.launch.plan),
            keep_last=config.control.keep_last,
            probe_token_ids=self.prompts.probe_token_ids,
        )

    def fleet(self, served_directory: Callable[[], Path | None]) -> Fleet:
        launch, config = self.launch, self.launch.config
        site = EngineSite(
            run_id=self.run_id,
            directory=launch.directory,
            config=config,
            device=launch.device,
            host=LOOPBACK,
            token=self.token,
            token_file=self.token_file,
            env=launch.environ,
            devices=launch.devices,
            meter=self.meter,
            cores=launch.cores,
        )
        engines = [
            self._engine(site, index, placement, served_directory)
            for index, placement in enumerate(launch.plan.instances)
        ]
        return Fleet(
            engines,
            config=config.supervision,
            spawner=self.spawner,
            weights=config.weights,
            post=self.inbox.post,
            rng=self.rng,
        )

    def _engine(
        self,
        site: EngineSite,
        index: int,
        placement: InstancePlacement,
        served_directory: Callable[[], Path | None],
    ) -> Engine:
        config = self.launch.config
        if endpoints := config.heterogeneous_rollout.endpoints:
            url = endpoints[index].url
            return ForeignEngine(site, placement, self.scheduler, url=url, rng=self.rng)
        base = config.rollout.rollout_port_base
        return Engine(
            site,
            placement,
            self.scheduler,
            port=base + index if base else 0,
            served_directory=served_directory,
            rng=self.rng,
            gate=self._gate(
                ChildId(placement.instance_id),
                placement.slots,
                needed_fraction=config.rollout.gpu_memory_utilization,
            ),
        )

    def gang(self) -> Gang:
        launch = self.launch
        on_cuda = launch.device == "cuda"
        slots = launch.plan.train.slots
        devices = tuple(launch.devices[slot] for slot in slots)
        site = GangSite(
            run_id=self.run_id,
            directory=launch.directory,
            placement=launch.plan.train,
            device=launch.device,
            env=dict(launch.environ),
            visible_devices=devices if on_cuda else (),
            rank_cores=tuple(launch.cores[slot] for slot in slots) if launch.cores else (),
        )
        gate = self._gate(TRAINER_ID, slots, needed_fraction=None)
        return Gang(
            site,
            spawner=self.spawner,
            config=launch.config.supervision,
            choose=CheckpointChooser(launch.directory, self.inbox),
            post=self.inbox.post,
            rng=self.rng,
            hindrance=None if gate is None else gate.hindrance,
        )

    def _gate(
        self, child_id: ChildId, slots: Sequence[int], *, needed_fraction: float | None
    ) -> DeviceGate | None:
        """Waits for the memory of devices that are the child's alone; None on CPU."""
        launch = self.launch
        if launch.device == "cpu":
            return None
        devices = [launch.devices[slot] for slot in slots]
        own = [it for it in devices if launch.devices.count(it) == devices.count(it)]
        return DeviceGate(child_id, own, needed_fraction=needed_fraction)

    def reward_pool(self) -> RewardPool:
        launch = self.launch
        return reward_pool_of(
            launch.config.data,
            run_id=self.run_id,
            run_dir=launch.directory.root,
            spawner=self.spawner,
            environ=launch.environ,
        )

    def runner(self, tasks: PromptDataset, fleet: Fleet, pool: RewardPool) -> RolloutRunner:
        config = self.launch.config
        return RolloutRunner(
            RunnerParts(
                tasks=tasks,
                workflow=load_workflow(config.data.workflow, config.data.workflow_args),
                tokenizer=self.prompts.tokenizer,
                router=EngineRouter(self.room, fleet),
                scorer=pool,
                post=self.inbox.post,
                settings=GenerationSettings(
                    run_seed=config.control.seed,
                    max_model_len=config.rollout.max_model_len,
                    max_new_tokens=config.rollout.max_new_tokens,
                    temperature=config.rollout.temperature,
                    top_p=config.rollout.top_p,
                ),
            )
        )

    def forecaster(self) -> Forecaster:
        launch = self.launch
        return Forecaster(
            launch.config, launch.plan, book=launch.book, store=launch.store, meter=self.meter
        )

    def load_exchange(self) -> LoadExchange | None:
        """With the other schedulers of the fleet; None without a shared directory."""
        scheduling = self.launch.config.heterogeneous_rollout.scheduling
        if not scheduling.shared_load_dir:
            return None
        writer = f"{self.rng.getrandbits(64):016x}"
        # One supervisor is one scheduler: its run and node name it among all others.
        rank = f"{self.run_id}-0"
        files = SharedDirectory(Path(scheduling.shared_load_dir), rank=rank, writer=writer)
        return LoadExchange(self.scheduler, files, scheduling, rank=rank, writer=writer)

    def gateway(self, fleet: Fleet) -> Gateway:
        config = self.launch.config
        options = GatewayOptions(
            model_names=(MODEL_NAME,),
            max_model_len=config.rollout.max_model_len,
            chat_default_tokens=config.rollout.max_new_tokens,
            queue_deadline_s=config.heterogeneous_rollout.scheduling.queue_deadline_s,
        )
        return Gateway(self.room, fleet.url_or_none, fleet.patience_with, options)

"""Builds the moving parts of a run: servers, gang, reward workers, runner, gateway."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from libra.data.dataset import PromptDataset
from libra.errors import InvariantError
from libra.ids import ChildId, InstanceId, NodeRank, RunId
from libra.planner.plan import HybridPlacement, InstancePlacement, TrainPlacement
from libra.scheduling.scheduler import Scheduler
from libra_supervisor.app.cluster import Cluster
from libra_supervisor.app.device_gate import (
    DeviceGate,
    NodeGate,
    all_of,
    look_here,
)
from libra_supervisor.app.drain_watch import DrainWatch, Traffic
from libra_supervisor.app.engine import Engine, EngineSite, HeldPort
from libra_supervisor.app.fleet import Fleet
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.app.foreign import ForeignEngine
from libra_supervisor.app.launch import Launch
from libra_supervisor.app.making import load_exchange, rollout_runner
from libra_supervisor.app.parts import batch_shape
from libra_supervisor.app.prompts import Prompts
from libra_supervisor.app.rank_mail import CheckpointChooser
from libra_supervisor.app.replicas import Hear, Replicas, make_replica_folder
from libra_supervisor.app.routing import EngineRouter
from libra_supervisor.app.scoring import reward_pool_of
from libra_supervisor.app.spread_rollouts import SpreadRollouts
from libra_supervisor.events import Event
from libra_supervisor.gateway.gateway import Gateway, GatewayOptions
from libra_supervisor.gateway.waiting import WaitingRoom
from libra_supervisor.inbox import Inbox
from libra_supervisor.instances.client import MODEL_NAME
from libra_supervisor.instances.serving_meter import ServingMeter
from libra_supervisor.loop.execute import Terms
from libra_supervisor.nodes.remote import remote_port
from libra_supervisor.nodes.site import LEADER
from libra_supervisor.process.spawn import Spawner
from libra_supervisor.ranks.gang import Gang, Hindrance
from libra_supervisor.ranks.torchrun import TRAINER_ID, GangSite
from libra_supervisor.rewards.pool import RewardPool
from libra_supervisor.rollouts.runner import RolloutRunner
from libra_supervisor.shared_load.exchange import LoadExchange

LOOPBACK: Final = "127.0.0.1"
NUM_PORTS: Final = 65_536


def port_of(instance_id: InstanceId, base: int) -> int:
    """`rollout_port_base` plus the number in the id, which no other instance of the run has had.

    0 takes any. A run of so many instances that the ports end goes on at the base.
    """
    if not base:
        return 0
    return base + int(instance_id.rpartition("-")[2]) % (NUM_PORTS - base)


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
    cluster: Cluster | None = None
    """The other nodes; None when there are none."""

    others: SpreadRollouts | None = None
    """What has trajectories made on them."""

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
            # Every node has to reach every server.
            host=LOOPBACK if self.cluster is None else self.cluster.site.own_host,
            token=self.token,
            token_file=self.token_file,
            env=launch.environ,
            devices=launch.devices,
            meter=self.meter,
            cores=launch.cores,
        )

        endpoints = config.heterogeneous_rollout.endpoints
        url_of = {
            placement.instance_id: endpoint.url
            for placement, endpoint in zip(launch.plan.instances, endpoints, strict=False)
        }

        def make(placement: InstancePlacement, has_devices: bool) -> Engine:
            self.meter.add(placement.instance_id, placement.tp)
            if placement.node:
                return self._remote_engine(
                    site, placement, served_directory, has_devices=has_devices
                )
            if url := url_of.get(placement.instance_id):
                return ForeignEngine(site, placement, self.scheduler, url=url, rng=self.rng)
            return Engine(
                site,
                placement,
                self.scheduler,
                port=port_of(placement.instance_id, config.rollout.rollout_port_base),
                served_directory=served_directory,
                rng=self.rng,
                gate=self._gate(
                    ChildId(placement.instance_id),
                    placement.slots,
                    needed_fraction=config.rollout.gpu_memory_utilization,
                ),
                has_devices=has_devices,
                traffic=self._traffic,
            )

        return Fleet(
            launch.plan.instances,
            make=make,
            watch=DrainWatch(self._traffic, self._give_back, self.inbox.post),
            config=config.supervision,
            spawner=self.spawner,
            weights=config.weights,
            post=self.inbox.post,
            rng=self.rng,
        )

    def _remote_engine(
        self,
        site: EngineSite,
        placement: InstancePlacement,
        served_directory: Callable[[], Path | None],
        *,
        has_devices: bool,
    ) -> Engine:
        """A server on another node, under that node's environment and its own devices."""
        cluster = self._others()
        node = cluster.nodes[placement.node]

        async def hold_port(host: str, port: int) -> HeldPort:
            return await remote_port(node, host, port)

        there = msgspec.structs.replace(
            site,
            host=cluster.site.hosts[placement.node],
            env={},
            devices=tuple(map(str, range(1 + max(placement.slots))))
            if site.device == "cuda"
            else site.devices,
            cores=(),
        )
        base = site.config.rollout.rollout_port_base
        return Engine(
            there,
            placement,
            self.scheduler,
            port=port_of(placement.instance_id, base),
            served_directory=served_directory,
            rng=self.rng,
            gate=self._node_gate(
                ChildId(placement.instance_id),
                placement.node,
                placement.slots,
                needed_fraction=site.config.rollout.gpu_memory_utilization,
            ),
            has_devices=has_devices,
            spawner=cluster.spawner_for(placement.node, self.spawner),
            hold_port=hold_port,
            traffic=self._traffic,
        )

    @property
    def _traffic(self) -> Traffic:
        """What is in flight on servers, from whichever node."""
        return self.scheduler if self.others is None else self.others

    def _give_back(self, instance_id: InstanceId) -> None:
        self.room.give_back(instance_id)
        if self.others is not None:
            self.others.give_back(instance_id)

    def _others(self) -> Cluster:
        if self.cluster is None:
            raise InvariantError("a plan for several nodes has none but this one")
        return self.cluster

    def gang(self) -> Gang:
        launch = self.launch
        cluster, train = self.cluster, launch.plan.train
        gang = Gang(
            self.gang_site(train),
            spawner=self._gang_spawner(),
            config=launch.config.supervision,
            choose=CheckpointChooser(launch.directory, self.inbox),
            post=self.inbox.post,
            rng=self.rng,
            hindrance=self._gang_hindrance(train, TRAINER_ID),
        )
        if cluster is not None:
            cluster.take_in_ranks_for(gang, TRAINER_ID)
        return gang

    def _gang_spawner(self) -> Spawner:
        cluster = self.cluster
        return self.spawner if cluster is None else cluster.gang_spawner(self.spawner)

    def replicas(self) -> Replicas:
        """Gangs for hybrid replicas, in the core's layout but for data parallelism."""
        directory = self.launch.directory
        make_replica_folder(directory)

        async def from_base(_attempt: int) -> None:
            return None

        def make(placement: HybridPlacement, hear: Hear, has_devices: bool) -> Gang:
            # Its ranks read the layout from the configuration: here only their number counts.
            own = TrainPlacement(
                tp=1,
                pp=1,
                cp=1,
                ep=1,
                dp=len(placement.slots),
                slots=placement.slots,
                node=placement.node,
                nodes=placement.nodes,
            )
            name = placement.replica_id
            sockets = directory.hybrid / name
            site = msgspec.structs.replace(
                self.gang_site(own),
                child_id=ChildId(name),
                arguments=("--replica", name, *(() if has_devices else ("--waits",))),
                socket_directory=sockets,
                is_restarted=False,
            )
            gang = Gang(
                site,
                spawner=self._gang_spawner(),
                config=self.launch.config.supervision,
                choose=from_base,
                post=hear,
                rng=self.rng,
                hindrance=self._gang_hindrance(own, site.child_id, has_devices=has_devices),
            )
            if self.cluster is not None:
                self.cluster.take_in_ranks_for(gang, site.child_id)
            return gang

        return Replicas(make, directory.hybrid, self.inbox.post)

    def reshape(self, gang: Gang, placement: TrainPlacement, *, probes: bool) -> None:
        site = self.gang_site(placement)
        if probes:
            site = msgspec.structs.replace(site, arguments=("--probe",))
        gang.reshape(site, self._gang_hindrance(placement, TRAINER_ID))

    def _gang_hindrance(
        self, placement: TrainPlacement, child_id: ChildId, *, has_devices: bool = True
    ) -> Hindrance | None:
        """On the devices of all nodes that the ranks lie on, and of those nodes themselves."""
        cluster = self.cluster
        slots_of: dict[NodeRank, list[int]] = {}
        for rank, slot in enumerate(placement.slots):
            slots_of.setdefault(placement.node_of_rank(rank), []).append(slot)
        gates = [
            self._node_gate(child_id, node, slots, needed_fraction=None)
            if node
            else self._gate(child_id, slots, needed_fraction=None)
            for node, slots in slots_of.items()
            if has_devices
        ]
        there = [it for it in gates if it is not None]
        if cluster is not None:
            return all_of(partial(cluster.gang_hindrance, placement), there)
        return there[0].hindrance if there else None

    def gang_site(self, placement: TrainPlacement) -> GangSite:
        launch = self.launch
        on_cuda = launch.device == "cuda"
        slots = placement.slots
        if any(placement.node_of_rank(rank) for rank in range(len(slots))):
            return GangSite(
                run_id=self.run_id,
                directory=launch.directory,
                placement=placement,
                device=launch.device,
                env={},
                agents=self._others().agents(
                    placement, launch.environ, launch.devices if on_cuda else ()
                ),
            )
        devices = tuple(launch.devices[slot] for slot in slots)
        return GangSite(
            run_id=self.run_id,
            directory=launch.directory,
            placement=placement,
            device=launch.device,
            env=dict(launch.environ),
            visible_devices=devices if on_cuda else (),
            rank_cores=tuple(launch.cores[slot] for slot in slots) if launch.cores else (),
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
        return DeviceGate(child_id, look_here(own), needed_fraction=needed_fraction)

    def _node_gate(
        self,
        child_id: ChildId,
        node: NodeRank,
        slots: Sequence[int],
        *,
        needed_fraction: float | None,
    ) -> NodeGate:
        """The same on another node, whose own devices are meant by the slots."""
        remote = self._others().nodes[node]
        if self.launch.device == "cpu":
            return NodeGate(remote, None)
        look = partial(remote.look_at_devices, tuple(slots))
        where = f" of node {node}"
        gate = DeviceGate(child_id, look, needed_fraction=needed_fraction, where=where)
        return NodeGate(remote, gate)

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
        return rollout_runner(
            self.launch.config,
            tasks,
            router=EngineRouter(self.room, fleet),
            scorer=pool,
            post=self.inbox.post if self.others is None else self.others.on_own,
        )

    def forecaster(self) -> Forecaster:
        launch = self.launch
        return Forecaster(
            launch.config, launch.plan, book=launch.book, store=launch.store, meter=self.meter
        )

    def load_exchange(self) -> LoadExchange | None:
        """With the other schedulers of the servers; None when this is the only one."""
        return load_exchange(
            self.scheduler,
            self.launch.config,
            self.launch.directory,
            run_id=self.run_id,
            node=None if self.cluster is None else LEADER,
            rng=self.rng,
        )

    def gateway(self, fleet: Fleet) -> Gateway:
        config = self.launch.config
        options = GatewayOptions(
            model_names=(MODEL_NAME,),
            max_model_len=config.rollout.max_model_len,
            chat_default_tokens=config.rollout.max_new_tokens,
            queue_deadline_s=config.heterogeneous_rollout.scheduling.queue_deadline_s,
        )
        return Gateway(self.room, fleet.url_or_none, fleet.patience_with, options)

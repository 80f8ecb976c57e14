"""What the supervisor and a trainer rank say to each other over `LIBRA_CONTROL`.

One Unix stream socket per rank; frames as in `libra.wire.framing`, each one msgpack-encoded
`RankCommand` (to the rank) or `RankEvent` (from it). Arrays travel as little-endian bytes.
"""

from typing import TypeAlias

import msgspec

from libra.ids import InstanceId, PolicyVersion, ReplicaId, RunId, TrajectoryId
from libra.wire.hybrid import (
    CoreJoined,
    FollowStep,
    HybridStep,
    JoinCore,
    LaneOpened,
    OpenLanes,
    StepFollowed,
)
from libra.wire.instance import ReloadAck, ReloadRequest, TransferTensor, WeightsTransfer


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory as the trainer sees it; L tokens, prompt and response together."""

    trajectory_id: TrajectoryId
    token_ids: bytes
    """int32[L]"""

    loss_mask: bytes
    """uint8[L]; 1 only on tokens the policy sampled. Position 0 is always 0."""

    rollout_logprobs: bytes
    """float32[L]; entry t is the engine's logprob of token t given tokens < t; 0 where masked."""

    advantage: float
    """Shared by every sampled token of the trajectory."""


class MiniBatch(msgspec.Struct, frozen=True):
    """One optimizer step's work for one data-parallel rank."""

    samples: tuple[Sample, ...]
    """This rank's shard; TP, PP and CP peers get the same one."""

    global_num_tokens: int
    """Sampled (loss-masked-in) tokens of the mini-batch over ALL data-parallel ranks.

    Those of hybrid replicas are among them."""

    global_num_sequences: int
    """Sequences with at least one sampled token, over all of them."""


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Train on one batch. Step k turns policy v(k-1) into v(k)."""

    step: int
    mini_batches: tuple[MiniBatch, ...]
    hybrids: HybridStep | None = None
    """Replicas that take part or follow; None when there are none, and nothing is kept."""


class ExportWeights(msgspec.Struct, frozen=True, tag=True):
    """Write HF weights of the current policy to `directory` (must not exist), manifest last.

    Every rank gathers; rank 0 writes. The probe's logprobs are computed under these weights.
    """

    run_id: RunId
    policy_version: PolicyVersion
    directory: str
    probe_token_ids: tuple[int, ...]
    is_durable: bool = True
    """They outlast a power cut, which takes the time of a disk."""


class OfferWeights(msgspec.Struct, frozen=True, tag=True):
    """Say what a transfer of the current policy would bring, and hold that policy."""

    run_id: RunId
    policy_version: PolicyVersion
    probe_token_ids: tuple[int, ...]


class SendWeights(msgspec.Struct, frozen=True, tag=True):
    """Send the offered weights to the members of a group.

    Every rank gathers; rank 0 sends, and answers with WeightsSent whether it worked or not.
    """

    policy_version: PolicyVersion
    nonce: str
    """Of the reload batch."""

    transfer: WeightsTransfer


class AbortTransfer(msgspec.Struct, frozen=True, tag=True):
    """A member of the group is lost: rank 0 ends the transfer for everybody. Obeyed at once."""

    group_id: str
    reason: str


class JudgeAcks(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 validates a whole ACK batch against the request it published."""

    request: ReloadRequest
    acks: tuple[ReloadAck, ...]


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Write a complete checkpoint of model, optimizer, scheduler and RNG for `step`.

    Every rank answers with SaveBegun once the state is in host memory, and goes on with the next
    command; rank 0 says CheckpointSaved when the directory is complete.
    """

    step: int
    directory: str
    """Final directory `checkpoints/step_NNNNNN`; it appears only when it is complete."""

    rollout_state: bytes
    """Opaque to the trainer; stored as `rollout_state.msgpack` beside the shards."""

    is_snapshot: bool = False
    """For replicas that are up already: it need not outlast the machine, and the ranks go on when
    it cannot be written."""


class TakeDevice(msgspec.Struct, frozen=True, tag=True):
    """The device is free: a rank that has said RankWarm goes on."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Leave cleanly with exit code 0."""

    reason: str


RankCommand: TypeAlias = (
    TrainStep
    | ExportWeights
    | OfferWeights
    | SendWeights
    | AbortTransfer
    | JudgeAcks
    | SaveCheckpoint
    | OpenLanes
    | JoinCore
    | FollowStep
    | TakeDevice
    | Shutdown
)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First frame on every connection."""

    run_id: RunId
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    dp_rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    ep_rank: int
    pid: int
    start_ticks: int
    """Field 22 of /proc/self/stat: with pid and boot id it proves identity."""

    gang: str = "trainer"
    """Of which ranks it is one: the core's or a hybrid replica's, by name of the child."""


class RankWarm(msgspec.Struct, frozen=True, tag=True):
    """A rank that was started before its device is free needs it now: it waits for TakeDevice."""

    rank: int


class ModelReady(msgspec.Struct, frozen=True, tag=True):
    """The rank has built its model and, on resume, restored the checkpoint of `step`."""

    rank: int
    step: int
    """0 for a new run; else the step of the restored checkpoint."""

    num_parameters: int
    build_s: float


class RecomputeProbed(msgspec.Struct, frozen=True, tag=True):
    """One complete recompute pass before training; sent before ModelReady by every rank.

    A rank whose memory did not hold it sends no ModelReady: it waits to be ended.
    """

    rank: int
    before_bytes: int
    """Held before the pass: on CUDA allocated by tensors, on the CPU resident."""

    peak_bytes: int
    """Held at its fullest moment."""

    error: str
    """Empty when it fit."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent from the rank's main thread at each micro-batch or phase change, so a hang shows."""

    rank: int
    step: int
    phase: str


class TrainMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of one training step, already reduced over all ranks."""

    loss: float
    grad_norm: float
    entropy: float
    clip_fraction: float
    kl_mismatch: float
    """Mean k3 of trainer against engine over sampled tokens, before the step's first update."""

    ratio_mean: float
    learning_rate: float
    num_tokens: int
    num_optimizer_steps: int
    num_skipped_steps: int
    """Optimizer steps skipped because the loss or gradient norm was not finite."""

    recompute_s: float
    train_s: float
    peak_memory_bytes: int


class StepTrained(msgspec.Struct, frozen=True, tag=True):
    """Sent by every rank; only rank 0's carries `metrics`."""

    rank: int
    step: int
    metrics: TrainMetrics | None
    dropped: dict[ReplicaId, str] = {}
    """From the core's rank 0: replicas that no longer count, and why."""


class WeightsExported(msgspec.Struct, frozen=True, tag=True):
    """Sent by rank 0 when the manifest is in place."""

    policy_version: PolicyVersion
    directory: str
    manifest_hash: str
    probe_logprobs: tuple[float, ...]
    """Entry i: logprob of probe token i+1 given tokens 0..i; one less than the probe tokens."""

    export_s: float


class WeightsOffered(msgspec.Struct, frozen=True, tag=True):
    """Sent by rank 0: its answer to OfferWeights."""

    policy_version: PolicyVersion
    offer_hash: str
    """Another one for every offer; the reload requests' manifest hash."""

    tied_embeddings: bool
    tensors: tuple[TransferTensor, ...]
    store_host: str
    store_port: int
    probe_logprobs: tuple[float, ...]
    """As in WeightsExported."""

    offer_s: float
    error: str = ""
    """Why these weights must not be served: a value is not finite."""


class WeightsSent(msgspec.Struct, frozen=True, tag=True):
    """Sent by rank 0 when the transfer of a batch is over; the ranks are free again."""

    policy_version: PolicyVersion
    nonce: str
    checksum: str
    """Of all bytes sent; what every ACK has to repeat."""

    num_bytes: int
    send_s: float
    error: str = ""
    """Why it was broken off; empty when every member took the last bucket."""


class AcksJudged(msgspec.Struct, frozen=True, tag=True):
    """Rank 0's verdict. `refused` maps an instance to the reason in words."""

    policy_version: PolicyVersion
    nonce: str
    """Of the batch whose ACKs were judged."""

    accepted: tuple[InstanceId, ...]
    refused: dict[InstanceId, str]
    slowest_instance: InstanceId | None
    slowest_total_s: float
    probe_difference: float
    """Largest |trainer - engine| probe logprob over the accepted instances."""


class SaveBegun(msgspec.Struct, frozen=True, tag=True):
    """Sent by every rank: later steps no longer change what the checkpoint will hold."""

    rank: int
    step: int


class CheckpointSaved(msgspec.Struct, frozen=True, tag=True):
    """Sent by rank 0, at any time after its SaveBegun."""

    step: int
    directory: str
    save_s: float
    """From the command to the directory's final name."""

    error: str = ""
    """Why there is none, of a snapshot; any other checkpoint that fails ends the rank."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Last words of a rank that is about to exit by an error."""

    rank: int
    exit_code: int
    """The run's exit code this error asks for (design: 2, 5, 6), or 4 for anything else."""

    message: str


RankEvent: TypeAlias = (
    Hello
    | RankWarm
    | ModelReady
    | RecomputeProbed
    | Heartbeat
    | StepTrained
    | WeightsExported
    | WeightsOffered
    | WeightsSent
    | AcksJudged
    | SaveBegun
    | CheckpointSaved
    | LaneOpened
    | CoreJoined
    | StepFollowed
    | RankFailed
)

"""Bodies of the HTTP calls between the supervisor and one vLLM server.

`POST /libra/reload` (bearer token) takes a `ReloadRequest` and answers 200 with a `ReloadAck`,
whose `error` says whether it worked. `GET /libra/state` answers an `InstanceState`, `GET
/libra/requests` (bearer token) an `OpenRequests`. All are JSON.

Every answer carries INSTANCE_HEADER and INCARNATION_HEADER. Each choice of a completion has
SPANS_FIELD, a list of `VersionSpan` over its output tokens (in a stream: in the choice's last
chunk), and a completion that is not a stream has VERSIONS_HEADER, the versions it used.
"""

import msgspec

from libra.config.weights import PauseMode, ReloadMethod, ReloadStrategy
from libra.ids import Incarnation, InstanceId, PolicyVersion, RunId

INSTANCE_ID_VARIABLE = "LIBRA_INSTANCE_ID"
INCARNATION_VARIABLE = "LIBRA_INCARNATION"
RUN_ID_VARIABLE = "LIBRA_RUN_ID"
WEIGHTS_DIRECTORY_VARIABLE = "LIBRA_WEIGHTS_DIR"
TOKEN_FILE_VARIABLE = "LIBRA_TOKEN_FILE"  # noqa: S105 - the name of a variable
"""Environment that a server is started with."""

GO_FILE_VARIABLE = "LIBRA_GO_FILE"
"""Set for a server whose devices are not free yet: it comes up as far as it can without them, makes
the file named here with WAITING_SUFFIX, and goes on when the file itself is there."""

WAITING_SUFFIX = ".waiting"

TOKEN_IDS_ONLY = "libra_token_ids_only"  # noqa: S105 - the name of a field
"""In a completion's `vllm_xargs`: its text will not be read, so none is made."""

INSTANCE_HEADER = "X-Libra-Instance"
INCARNATION_HEADER = "X-Libra-Incarnation"
VERSIONS_HEADER = "X-Libra-Policy-Versions"
SPANS_FIELD = "libra_version_spans"
WEIGHTS_UNKNOWN = "weights unknown"
"""How the message of a 503 begins when a server refuses to answer with unproven weights."""


class FileStamp(msgspec.Struct, frozen=True, array_like=True):
    """Which file it is, and that it has not been written since; see `libra.storage.receipt`."""

    name: str
    device: int
    inode: int
    num_bytes: int
    changed_ns: int
    """ctime."""


class WeightsReceipt(msgspec.Struct, frozen=True):
    """Every byte of these files was compared with the manifest, and no value is NaN or Inf."""

    kernel: str
    """Boot id of the host that read them; a server on another one reads for itself."""

    files: tuple[FileStamp, ...]
    """In the order of the manifest."""


class TransferTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor under its Hugging Face name."""

    name: str
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""

    shape: tuple[int, ...]


class WeightsTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that come from trainer rank 0 through a process group, instead of from a disk."""

    group_id: str
    """Names the group in the store; a broken one is never used again."""

    store_host: str
    store_port: int
    """The TCP store that rank 0 listens with."""

    world_size: int
    rank_offset_of: dict[InstanceId, int]
    """Rank of each member's first worker; the trainer is rank 0."""

    tied_embeddings: bool
    tensors: tuple[TransferTensor, ...]
    """In the order in which they are sent."""

    bucket_bytes: int
    timeout_s: float
    """Longest wait for the other members, before data flows."""

    stall_s: float
    """Longest wait for the next bucket."""


class ReloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Bring one server to `policy_version`.

    The same request goes to every instance of a batch, with the receipt of its own node.
    """

    run_id: RunId
    policy_version: PolicyVersion
    nonce: str
    """Random per batch: an ACK of an earlier try at the same version is told apart by it."""

    weights_directory: str
    """Absolute path under the run's weights directory; empty for a transfer."""

    manifest_hash: str
    """Of a transfer: names what rank 0 offered (`libra.wire.rank.WeightsOffered`)."""

    pause_mode: PauseMode
    probe_token_ids: tuple[int, ...]
    """At least two; the ACK has the logprob of each but the first."""

    strategy: ReloadStrategy = "parallel"
    """How the batch goes over the instances; the ACK repeats it."""

    force: bool = False
    """Allow a version that is not newer than the loaded one."""

    receipt: WeightsReceipt | None = None
    """From whoever read the files of `manifest_hash` in full; spares a server on the same host it.
    """

    transfer: WeightsTransfer | None = None


class ReloadAck(msgspec.Struct, frozen=True, kw_only=True):
    """What one server did with a `ReloadRequest`. Times in seconds, each at least 0."""

    instance_id: InstanceId
    incarnation: Incarnation
    run_id: RunId
    nonce: str
    policy_version: PolicyVersion | None
    """The version the server answers with now, None if it is unknown after a failed load; equals
    the request's when `error` is None."""

    method: ReloadMethod
    strategy: ReloadStrategy
    lock_wait_s: float
    process_stop_s: float
    """0 for inplace."""

    model_load_s: float
    total_s: float
    """At least the sum of the three parts."""

    manifest_hash: str
    verified: tuple[str, ...]
    """Names of the checks that passed, in order: manifest, then files (read in full here) or
    receipt (read in full on this host for the request, unchanged since), load, probe. Of a
    transfer: tensors (names, shapes and dtypes fit), checksum, load, probe."""

    probe_logprobs: tuple[float, ...]
    """As in `libra.wire.rank.WeightsExported`, from this engine under the new weights."""

    checksum: str = ""
    """Of the bytes that came by transfer, as received; empty otherwise."""

    error: str | None = None
    was_aborted: bool = False
    """A transfer was broken off by another member: this one is not at fault."""


class InstanceState(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says about itself."""

    instance_id: InstanceId
    incarnation: Incarnation
    run_id: RunId
    policy_version: PolicyVersion | None
    """None: unknown (a reload failed half way, or nothing has been confirmed yet)."""

    is_paused: bool
    manifest_hash: str | None
    is_asleep: bool = False
    """Its engine has given its device's memory back: nothing can be loaded."""


class OpenRequests(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is working on."""

    num_tokens: dict[str, int]
    """Answer tokens so far, over all choices, by the request's X-Request-Id. A request that waits
    its turn is in it with 0; one that the engine does not have (any more) is not in it."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one completion is sampled."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence tokens."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Output tokens [start, end) of one completion that one policy version produced."""

    policy_version: PolicyVersion
    start: int
    end: int

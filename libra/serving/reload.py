"""The guarded reload of one server.

Nothing is touched before the weights are proven whole; nothing is answered afterwards before they
are proven loaded.
"""

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from libra.errors import DataError, LibraError, PeerError, RejectedError
from libra.ids import PolicyVersion
from libra.serving.engine import Engine
from libra.serving.gate import Gate
from libra.serving.identity import ServingIdentity
from libra.serving.ledger import VersionLedger
from libra.storage.arrival import when_visible
from libra.storage.manifests import (
    names_in,
    read_announced,
    verify_and_stamp,
    verify_structure,
)
from libra.storage.receipt import holds, is_as_stamped
from libra.storage.safetensors import model_tensors
from libra.transfer.outcome import TransferAbortedError
from libra.weights.compatibility import incompatibilities
from libra.weights.manifest import TensorEntry, WeightsManifest
from libra.wire.instance import (
    FileStamp,
    InstanceState,
    ReloadAck,
    ReloadRequest,
    WeightsReceipt,
    WeightsTransfer,
)

PROBE_TIMEOUT_S = 120.0
MIN_PROBE_TOKENS = 2
MAX_PROBLEMS_SHOWN = 5


class Measured:
    """Seconds and checks of one reload, in the making."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._began_at = monotonic()
        self.lock_wait_s = 0.0
        self.model_load_s = 0.0
        self.verified: list[str] = []
        self.probe_logprobs: tuple[float, ...] = ()
        self.checksum = ""

    @property
    def total_s(self) -> float:
        return self._monotonic() - self._began_at

    def end_lock_wait(self) -> None:
        self.lock_wait_s = self.total_s

    @contextmanager
    def loading(self) -> Iterator[None]:
        began_at = self._monotonic()
        yield
        self.model_load_s = self._monotonic() - began_at


class Checked(msgspec.Struct, frozen=True):
    """Files that may be loaded."""

    manifest: WeightsManifest
    stamps: tuple[FileStamp, ...]
    """Of the files as they were checked."""

    is_spared: bool
    """The request's receipt holds, so that not every byte was read here."""


class GuardedReload:
    """One at a time. `monotonic` in seconds."""

    def __init__(
        self,
        identity: ServingIdentity,
        engine: Engine,
        gate: Gate,
        ledger: VersionLedger,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._gate = gate
        self._ledger = ledger
        self._monotonic = monotonic
        self._lock = anyio.Lock()
        self._is_replacing = False
        self._is_asleep = False
        self._manifest_hash = identity.served_manifest_hash
        self._loaded: Sequence[TensorEntry] | None = None
        self._group_id: str | None = None
        # The base model may be of another dtype than what is trained; published versions not.
        self._may_cast = identity.served_manifest_hash is None

    @property
    def is_replacing(self) -> bool:
        """True while the engine is paused for new weights: it may not answer then."""
        return self._is_replacing

    async def put_to_sleep(self, forward: Callable[[], Awaitable[None]]) -> None:
        """Have `forward` tell the engine to sleep, not in the middle of a reload.

        Whatever it answers, nothing is loaded before `on_woken`: into memory that the engine has
        given back nothing can be written.
        """
        async with self._lock:
            self._is_asleep = True
            await forward()

    def on_woken(self) -> None:
        """The engine has all of its memory again."""
        self._is_asleep = False

    async def state(self) -> InstanceState:
        version = self._ledger.version
        # An engine that loads weights answers nothing else until it has them.
        is_paused = self._is_replacing or await self._engine.is_paused()
        return InstanceState(
            instance_id=self._identity.instance_id,
            incarnation=self._identity.incarnation,
            run_id=self._identity.run_id,
            policy_version=version,
            is_paused=is_paused,
            is_asleep=self._is_asleep,
            manifest_hash=None if version is None else self._manifest_hash,
        )

    async def reload(self, request: ReloadRequest) -> ReloadAck:
        """Load what `request` names; failures are in the ACK.

        After a check that failed the server goes on as it was; after a load that failed its
        version is unknown and it refuses completions until a reload succeeds.
        """
        measured = Measured(self._monotonic)
        async with self._lock:
            measured.end_lock_wait()
            try:
                self._check_request(request)
                if request.transfer is None:
                    await self._from_files(request, measured)
                else:
                    await self._by_transfer(request, request.transfer, measured)
            except LibraError as exc:
                return self._ack(request, measured, error=exc)
            return self._ack(request, measured, error=None)

    async def _from_files(self, request: ReloadRequest, measured: Measured) -> None:
        directory = self._checked_directory(request)
        checked = await self._check(request, directory, measured)

        async def load() -> None:
            await self._engine.load(directory)
            _check_unchanged(directory, checked)

        await self._replace(request, load, checked.manifest.tensors, measured)

    async def _by_transfer(
        self, request: ReloadRequest, transfer: WeightsTransfer, measured: Measured
    ) -> None:
        tensors = tuple(
            TensorEntry(name=it.name, dtype=it.dtype, shape=it.shape, file="")
            for it in transfer.tensors
        )
        if transfer.tied_embeddings != self._engine.has_tied_embeddings:
            raise DataError("trainer and server do not agree on tied embeddings")
        await anyio.to_thread.run_sync(
            partial(self._check_fit, "the transfer", tensors, tied=transfer.tied_embeddings)
        )
        measured.verified.append("tensors")
        await self._join(transfer)

        async def load() -> None:
            measured.checksum = await self._engine.receive(transfer, nonce=request.nonce)
            measured.verified.append("checksum")

        try:
            await self._replace(request, load, tensors, measured)
        except BaseException:
            self._group_id = None
            raise

    async def _join(self, transfer: WeightsTransfer) -> None:
        """Join the group unless it is the one that served before; the server is not paused yet."""
        if transfer.group_id == self._group_id:
            return
        self._group_id = None
        offset = transfer.rank_offset_of.get(self._identity.instance_id)
        if offset is None:
            raise RejectedError(f"{self._identity.instance_id} has no rank in the transfer's group")
        await self._engine.join_transfer(transfer, rank_offset=offset)
        self._group_id = transfer.group_id

    async def _check(self, request: ReloadRequest, directory: Path, measured: Measured) -> Checked:
        try:
            read = partial(read_announced, directory, request.manifest_hash)
            manifest = await when_visible(read)
            self._check_manifest(request, manifest)
            measured.verified.append("manifest")
            checked = await when_visible(
                partial(self._check_files, directory, manifest, request.receipt)
            )
            measured.verified.append("receipt" if checked.is_spared else "files")
        except OSError as exc:
            raise DataError(f"{directory} cannot be read: {exc}") from exc
        return checked

    def _check_request(self, request: ReloadRequest) -> None:
        if request.run_id != self._identity.run_id:
            raise RejectedError(
                f"the request is of run {request.run_id}; this server is of {self._identity.run_id}"
            )
        if self._is_asleep:
            raise RejectedError("the engine sleeps: it has no memory for weights")
        if len(request.probe_token_ids) < MIN_PROBE_TOKENS:
            raise RejectedError(f"a probe needs at least {MIN_PROBE_TOKENS} tokens")
        if problem := self._engine.probe_problem(request.probe_token_ids):
            raise RejectedError(problem)
        loaded = self._ledger.version
        if loaded is not None and request.policy_version <= loaded and not request.force:
            raise RejectedError(
                f"v{request.policy_version} is not newer than the loaded v{loaded}; force it to "
                "load it all the same"
            )

    def _checked_directory(self, request: ReloadRequest) -> Path:
        root = self._identity.weights_directory
        outside = RejectedError(f"{request.weights_directory!r} is not a version under {root}")
        try:
            directory = Path(request.weights_directory).resolve()
        except (OSError, RuntimeError, ValueError) as exc:  # a loop of links, a NUL
            raise outside from exc
        if not directory.is_relative_to(root) or directory == root:
            raise outside
        return directory

    def _check_manifest(self, request: ReloadRequest, manifest: WeightsManifest) -> None:
        pairs = (
            ("run id", request.run_id, manifest.run_id),
            ("policy version", request.policy_version, manifest.policy_version),
            ("tied embeddings", self._engine.has_tied_embeddings, manifest.tied_embeddings),
        )
        for name, wanted, found in pairs:
            if wanted != found:
                raise DataError(
                    f"{request.weights_directory}: the {name} is {found!r} instead of {wanted!r}"
                )

    def _check_files(
        self, directory: Path, manifest: WeightsManifest, receipt: WeightsReceipt | None
    ) -> Checked:
        is_spared = receipt is not None and holds(receipt, directory, names_in(manifest))
        if receipt is not None and is_spared:
            verify_structure(directory, manifest)
            stamps = receipt.files
        else:
            stamps, _ = verify_and_stamp(directory, manifest)
        self._check_fit(str(directory), manifest.tensors, tied=manifest.tied_embeddings)
        return Checked(manifest, stamps, is_spared)

    def _check_fit(self, what: str, tensors: Sequence[TensorEntry], *, tied: bool) -> None:
        if self._loaded is None:
            self._loaded = model_tensors(self._engine.base_directory)
        problems = incompatibilities(
            self._loaded, tensors, tied_embeddings=tied, may_cast=self._may_cast
        )
        if problems:
            shown = "; ".join(problems[:MAX_PROBLEMS_SHOWN])
            raise DataError(f"{what} does not fit the loaded model: {shown}")

    async def _replace(
        self,
        request: ReloadRequest,
        load: Callable[[], Awaitable[None]],
        tensors: Sequence[TensorEntry],
        measured: Measured,
    ) -> None:
        await self._gate.close()
        self._is_replacing = True
        try:
            await self._engine.pause(request.pause_mode)
            with measured.loading():
                await load()
            measured.verified.append("load")
            await self._engine.reset_caches()
            counts = await self._engine.begin_version(request.policy_version)
            self._ledger.begin(request.policy_version, counts)
            measured.probe_logprobs = await self._probe(request.probe_token_ids)
            measured.verified.append("probe")
        except BaseException as exc:
            await self._give_up(request.policy_version, exc)
            if isinstance(exc, TransferAbortedError):
                raise
            if isinstance(exc, Exception):
                raise PeerError(f"loading v{request.policy_version} failed: {exc!r}") from exc
            raise
        finally:
            self._is_replacing = False
        self._ledger.prove()
        self._manifest_hash = request.manifest_hash
        self._loaded, self._may_cast = tensors, False
        self._gate.open()

    async def _probe(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        with anyio.fail_after(PROBE_TIMEOUT_S):
            logprobs = await self._engine.resume_with_probe(token_ids)
        if not all(map(math.isfinite, logprobs)):
            raise PeerError("a logprob of the probe is not finite")
        return logprobs

    async def _give_up(self, version: PolicyVersion, cause: BaseException) -> None:
        """Refuse everything, and end what runs: one step on broken weights kills the engine."""
        self._ledger.lose()
        self._gate.refuse(f"loading v{version} failed: {cause!r}")
        with anyio.move_on_after(PROBE_TIMEOUT_S, shield=True):
            # A dead engine, whatever it raises, runs nothing any more.
            with suppress(Exception):
                await self._engine.pause("abort")

    def _ack(
        self, request: ReloadRequest, measured: Measured, *, error: LibraError | None
    ) -> ReloadAck:
        total_s = measured.total_s
        return ReloadAck(
            instance_id=self._identity.instance_id,
            incarnation=self._identity.incarnation,
            run_id=self._identity.run_id,
            nonce=request.nonce,
            policy_version=self._ledger.version,
            method="inplace",
            strategy=request.strategy,
            lock_wait_s=measured.lock_wait_s,
            process_stop_s=0.0,
            model_load_s=measured.model_load_s,
            total_s=total_s,
            manifest_hash=request.manifest_hash,
            verified=tuple(measured.verified),
            probe_logprobs=measured.probe_logprobs,
            checksum=measured.checksum,
            error=None if error is None else str(error),
            was_aborted=isinstance(error, TransferAbortedError),
        )


def _check_unchanged(directory: Path, checked: Checked) -> None:
    """What was loaded is what was checked. Raises DataError."""
    if not is_as_stamped(directory, names_in(checked.manifest), checked.stamps):
        raise DataError(f"{directory} was changed while it was loaded")

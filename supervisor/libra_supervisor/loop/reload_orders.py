"""What servers are asked for by one batch of reloads after the other. Pure."""

from libra.config.weights import WeightsConfig
from libra.ids import PolicyVersion, RunId
from libra.wire.instance import ReloadRequest, WeightsReceipt, WeightsTransfer
from libra.wire.rank import WeightsExported
from libra_supervisor.loop.moment import Moment


class ReloadOrders:
    """Numbers the batches and remembers the newest version that was asked for."""

    def __init__(
        self, run_id: RunId, weights: WeightsConfig, probe_token_ids: tuple[int, ...]
    ) -> None:
        self._run_id = run_id
        self._weights = weights
        self._probe_token_ids = probe_token_ids
        self._num_batches = 0
        self._newest_asked: PolicyVersion | None = None

    def next_nonce(self, *, attempt: int, at: Moment) -> str:
        self._num_batches += 1
        return f"{attempt}-{self._num_batches}-{at.wall_ns:x}"

    def request(
        self,
        exported: WeightsExported,
        *,
        nonce: str,
        is_catch_up: bool,
        receipt: WeightsReceipt | None,
        transfer: WeightsTransfer | None,
    ) -> ReloadRequest:
        # What is asked for again, after a failure or by a gang that went back, is not newer. Nor
        # is anything known yet of servers that an earlier supervisor left.
        newest = self._newest_asked
        force = is_catch_up or newest is None or exported.policy_version <= newest
        self._newest_asked = max(exported.policy_version, newest or exported.policy_version)
        return ReloadRequest(
            run_id=self._run_id,
            policy_version=exported.policy_version,
            nonce=nonce,
            weights_directory=exported.directory,
            manifest_hash=exported.manifest_hash,
            strategy=self._weights.rollout_weight_reload_strategy,
            pause_mode=self._weights.rollout_weight_pause_mode,
            probe_token_ids=self._probe_token_ids,
            force=force,
            receipt=receipt,
            transfer=transfer,
        )

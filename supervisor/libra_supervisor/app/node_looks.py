"""What a follower looks at for its leader: published weights, and the memory of its devices."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread

from libra import clock
from libra.errors import DataError, SiteError
from libra.storage.arrival import when_visible
from libra.storage.manifests import verify_announced
from libra.storage.receipt import SETTLE_S
from libra.tracing.log import get_log
from libra.wire.node import DevicesSeen, Failed, LookAtDevices, ReadWeights, WeightsRead
from libra_supervisor.doctor.accelerators import device_memory

_log = get_log()


async def read(command: ReadWeights) -> WeightsRead | Failed:
    """Once for all servers here: they read through this host's page cache, as we do."""
    # Without it the files would often be too new for a receipt.
    await clock.sleep(2 * SETTLE_S)

    def on_wait(lack: str) -> None:
        _log.warning("weights_not_seen_yet", why=lack)

    check = partial(verify_announced, Path(command.directory), command.manifest_hash)
    try:
        return WeightsRead(command.call, await when_visible(check, on_wait=on_wait))
    except DataError as error:
        return Failed(command.call, str(error))


async def seen(command: LookAtDevices, devices: Sequence[str]) -> DevicesSeen | Failed:
    """`devices` are this node's, by slot."""
    try:
        wanted = devices_of(command.slots, devices)
    except SiteError as error:
        return Failed(command.call, str(error))
    # What others have too is never free when one of them runs.
    own = [it for it in wanted if devices.count(it) == wanted.count(it)]
    try:
        return DevicesSeen(command.call, await anyio.to_thread.run_sync(device_memory, own), "")
    except SiteError as error:
        return DevicesSeen(command.call, (), str(error))


def devices_of(slots: Sequence[int], devices: Sequence[str]) -> list[str]:
    """The devices that slots stand for. Raises SiteError for a slot that is not there."""
    if any(slot >= len(devices) for slot in slots):
        wanted = ",".join(map(str, slots))
        raise SiteError(f"slots {wanted} are wanted here, and {len(devices)} devices are")
    return [devices[slot] for slot in slots]

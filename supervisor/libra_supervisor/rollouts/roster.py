"""What followers know of the servers: kept by what the loop says of routing, sent as changes. Pure.

It says what the leader's own scheduler is told, so that every scheduler of the cluster sees the
same servers, each with a little delay.
"""

import msgspec

from libra.ids import Incarnation, InstanceId, PolicyVersion
from libra.wire.node_rollouts import ServerEntry, Servers


class Roster:
    """The servers of one leader. A revision is what `take_changes` has given out."""

    def __init__(self) -> None:
        self._entry_of: dict[InstanceId, ServerEntry] = {}
        self._wanted: PolicyVersion | None = None
        self._revision = 0
        self._changed: set[InstanceId] = set()
        self._withdrawn_at: dict[InstanceId, int] = {}
        """In which revision a server that may not be routed to was taken out."""

    @property
    def revision(self) -> int:
        return self._revision

    def know(
        self,
        instance_id: InstanceId,
        incarnation: Incarnation,
        *,
        url: str,
        tp: int,
        kv_capacity_tokens: int | None,
        is_planned: bool,
    ) -> None:
        """Tell of a process; one that is known keeps what else is known of it."""
        before = self._entry_of.get(instance_id)
        if before is None or before.incarnation != incarnation:
            before = ServerEntry(
                instance_id=instance_id,
                incarnation=incarnation,
                url=url,
                tp=tp,
                is_planned=is_planned,
            )
        self._set(msgspec.structs.replace(before, url=url, kv_capacity_tokens=kv_capacity_tokens))

    def serve(self, instance_id: InstanceId, version: PolicyVersion) -> None:
        """Route to it: it serves `version`, which is the wanted one from now on."""
        self._wanted = version
        entry = self._entry_of.get(instance_id)
        if entry is not None:
            self._withdrawn_at.pop(instance_id, None)
            self._set(
                msgspec.structs.replace(entry, version=version, is_ready=True, is_draining=False)
            )

    def withdraw(self, instance_id: InstanceId, *, is_draining: bool) -> None:
        entry = self._entry_of.get(instance_id)
        if entry is None:
            return
        self._withdrawn_at.setdefault(instance_id, self._revision + 1)
        what = {"is_draining": True} if is_draining else {"is_ready": False}
        self._set(msgspec.structs.replace(entry, **what))

    def forget(self, instance_id: InstanceId) -> None:
        if self._entry_of.pop(instance_id, None) is not None:
            self._changed.add(instance_id)
        self._withdrawn_at.pop(instance_id, None)

    def take_changes(self) -> Servers | None:
        """What has changed since the last call; None when nothing has."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, set()
        self._revision += 1
        return Servers(
            revision=self._revision,
            wanted=self._wanted,
            changed=tuple(self._entry_of[it] for it in sorted(changed) if it in self._entry_of),
            gone=tuple(it for it in sorted(changed) if it not in self._entry_of),
        )

    def whole(self) -> Servers:
        """Everything, as of the newest revision; changes since then come with the next one."""
        return Servers(
            revision=self._revision,
            wanted=self._wanted,
            changed=tuple(self._entry_of.values()),
        )

    def may_still_get_requests(self, instance_id: InstanceId, *, read: int) -> bool:
        """Whether a node that has read revision `read` does not know yet that it was withdrawn."""
        withdrawn_at = self._withdrawn_at.get(instance_id)
        return withdrawn_at is not None and read < withdrawn_at

    def _set(self, entry: ServerEntry) -> None:
        if self._entry_of.get(entry.instance_id) != entry:
            self._entry_of[entry.instance_id] = entry
            self._changed.add(entry.instance_id)

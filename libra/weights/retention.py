"""Which published versions may be deleted. Pure; the caller removes the directories."""

from collections.abc import Collection

from libra.ids import PolicyVersion


def deletable_versions(
    published: Collection[PolicyVersion],
    *,
    keep_last: int,
    pinned: Collection[PolicyVersion],
    in_use: Collection[PolicyVersion],
) -> tuple[PolicyVersion, ...]:
    """Versions that nobody has to read any more, oldest first.

    Kept are the `keep_last` newest, the `pinned` (the target of an open reload batch or of a
    joiner catching up, a version that a checkpoint's resume would load) and those `in_use` by a
    server that has not left: it is the version to go back to when that server's next load fails.
    A server of unknown version has to load the target, which is pinned.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last is {keep_last}; at least the newest version is kept")
    kept = set(sorted(published)[-keep_last:]) | set(pinned) | set(in_use)
    return tuple(sorted(set(published) - kept))

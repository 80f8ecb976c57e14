"""Who else may use a file that holds a secret, by its mode and by real access lists."""

import os
import struct

import pytest

from libra.config.environment import Environment
from libra.errors import SiteError
from libra.storage import secrecy
from libra.storage.secrecy import others_may_use
from libra_supervisor.api.access import read_or_make_token
from libra_supervisor.nodes.token import node_token

OWNER, USER, GROUP_OF_FILE, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
NOBODY = 0xFFFFFFFF
US, STRANGER = os.geteuid(), 54321


def acl(*named, of_group=0, mask=4, other=0):
    """What systemd's fd_add_uid_acl_permission() makes of mode 0400, but for the changes."""
    entries = [(OWNER, 4, NOBODY), *named, (GROUP_OF_FILE, of_group, NOBODY)]
    entries += [(MASK, mask, NOBODY), (OTHER, other, NOBODY)]
    entries.sort(key=lambda entry: entry[0])
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "node-token"
    path.write_text("a secret of the nodes\n")
    path.chmod(0o400)
    return path


def give(path, raw):
    os.setxattr(path, "system.posix_acl_access", raw)


@pytest.mark.parametrize(
    ("mode", "is_open"),
    [(0o400, False), (0o600, False), (0o440, True), (0o640, True), (0o404, True), (0o420, True)],
)
def test_without_a_list_the_mode_says_who_may(secret, mode, is_open):
    secret.chmod(mode)
    assert others_may_use(secret) is is_open


@pytest.mark.parametrize(
    ("raw", "is_open"),
    [
        (acl((USER, 4, US)), False),
        (acl((USER, 4, US), (USER, 0, STRANGER), (GROUP, 0, STRANGER)), False),
        (acl((USER, 6, US), mask=6), True),
        (acl((USER, 4, STRANGER)), True),
        (acl((USER, 4, US), (USER, 4, STRANGER)), True),
        (acl((USER, 4, US), (GROUP, 4, STRANGER)), True),
        (acl((GROUP, 4, US)), True),
        (acl((USER, 4, US), of_group=4), True),
        (acl((USER, 4, US), other=4), True),
        # The mask takes away what the entries say.
        (acl((USER, 4, STRANGER), of_group=4, mask=0), False),
    ],
    ids=[
        "we read",
        "nothing for others",
        "we write",
        "a stranger",
        "both",
        "a group",
        "a group with our number",
        "the file's group",
        "everybody",
        "masked",
    ],
)
def test_a_list_may_let_this_user_read_and_nobody_else(secret, raw, is_open):
    give(secret, raw)
    assert others_may_use(secret) is is_open


def test_the_owner_of_a_file_with_a_list_is_root_or_this_user(secret, monkeypatch):
    give(secret, acl((USER, 4, STRANGER)))
    monkeypatch.setattr(secrecy.os, "geteuid", lambda: STRANGER)
    assert others_may_use(secret) is (secret.stat().st_uid != 0)
    if secret.stat().st_uid == 0:
        os.chown(secret, STRANGER + 1, 0)
        assert others_may_use(secret)


def test_a_credential_of_systemd_is_a_token_and_one_that_others_may_read_is_none(secret):
    give(secret, acl((USER, 4, US)))
    assert node_token(str(secret), Environment()) == "a secret of the nodes"
    assert read_or_make_token(secret) == "a secret of the nodes"
    give(secret, acl((USER, 4, STRANGER)))
    with pytest.raises(SiteError, match="others may read"):
        node_token(str(secret), Environment())
    with pytest.raises(SiteError, match="others may read"):
        read_or_make_token(secret)

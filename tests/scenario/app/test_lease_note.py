"""Where ranks of a node read its lease, whatever tidies temporary folders."""

import shutil
import tempfile

import anyio
import pytest

from libra import clock
from libra.errors import SiteError
from libra.storage.lease_file import LeaseReader
from libra.wire.node import PROTOCOL, Envelope, Hello, Welcome
from libra_supervisor.app.lease_note import lease_note
from libra_supervisor.nodes.allegiance import Allegiance
from libra_supervisor.nodes.lease import LeaseTerms
from libra_supervisor.nodes.session import KeepLimits

TERMS = LeaseTerms(lease_s=10.0, orphan_grace_s=30.0)
HELLO = Hello(
    protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=1, host="h", boot_id="b",
    pid=1, start_ticks=1, dial=0,
)  # fmt: skip
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def member():
    side = Allegiance(HELLO, TERMS, KeepLimits(), now=clock.now())
    side.hello(())
    welcome = Welcome(
        run_id="r", run_directory="/r", term=1, leader="L", session="s", received=0, lease_s=10.0,
        orphan_grace_s=30.0,
    )  # fmt: skip
    side.on_reply(welcome, now=clock.now())
    renew(side)
    return side


def renew(side):
    now = clock.now()
    side.on_envelope(Envelope(0, side.beat(now=now).beat), now=now)


@pytest.mark.parametrize("is_gone", ["file", "folder", "another file is there"])
async def test_a_rank_that_starts_finds_the_lease_though_its_file_was_removed(temporary, is_gone):
    side = member()
    with lease_note(side, "run-1", 1) as note:
        first = note.path
        before = LeaseReader(note.for_start())
        assert note.path == first
        if is_gone == "folder":
            shutil.rmtree(first.parent)
        else:
            first.unlink()
        if is_gone == "another file is there":
            first.write_bytes(bytes(8))
        after = LeaseReader(note.for_start())
        assert after.until() > clock.monotonic() + 9.0
        # Ranks that run already read on, and are told the same.
        await anyio.sleep(0.3)
        renew(side)
        note.write()
        assert before.until() == after.until() > clock.monotonic() + 9.9
    assert list(temporary.iterdir()) == []


async def test_what_a_process_of_the_node_left_is_removed_by_its_next_one(temporary):
    with lease_note(member(), "run-1", 1) as of_another, lease_note(member(), "run-1", 10) as other:
        left = temporary / "libra-run-1-2-abcdefgh"
        left.mkdir()
        (left / "lease").touch()
        with lease_note(member(), "run-1", 2) as note:
            assert not left.exists()
            assert note.path.exists()
        assert of_another.path.exists()
        assert other.path.exists()


async def test_a_machine_without_room_for_it_is_named(temporary):
    side = member()
    with lease_note(side, "run-1", 1) as note:
        shutil.rmtree(temporary)
        temporary.write_text("")
        try:
            with pytest.raises(SiteError, match=f"{temporary}/libra-run-1-1-.* cannot be written"):
                note.for_start()
        finally:
            temporary.unlink()
            temporary.mkdir()


async def test_the_end_that_ranks_read_is_never_later_than_that_of_the_lease(
    monkeypatch, temporary
):
    """The loop's clock is behind within a turn: how much it is off by then is no news."""
    side = member()
    with lease_note(side, "run-1", 1) as note:
        known = LeaseReader(note.path).until()
        now = clock.now()
        monkeypatch.setattr(clock, "now", lambda: now - 5.0)
        note.write()
        assert LeaseReader(note.path).until() <= known

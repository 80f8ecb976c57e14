"""What a follower makes of a leader's answer to its Hello."""

import pytest

from libra.wire.node import PROTOCOL, Hello, Refused, Welcome
from libra_supervisor.nodes.allegiance import Allegiance, Opened, SessionOver, TurnedAway
from libra_supervisor.nodes.lease import LeaseTerms, Standing
from libra_supervisor.nodes.session import KeepLimits

TERMS = LeaseTerms(lease_s=10.0, orphan_grace_s=30.0)
ABOUT = Hello(
    protocol=PROTOCOL, version="1", config_digest="d", run_id="", node=1, host="h", boot_id="b",
    pid=7, start_ticks=9, dial=0,
)  # fmt: skip


def member():
    side = Allegiance(ABOUT, TERMS, KeepLimits(), now=0.0)
    welcome = Welcome(
        run_id="r", run_directory="/r", term=1, leader="L", session="s", received=0, lease_s=10.0,
        orphan_grace_s=30.0,
    )  # fmt: skip
    side.hello(())
    assert isinstance(side.on_reply(welcome, now=0.0), Opened)
    return side


def test_who_is_refused_for_good_is_turned_away_with_its_session_and_without():
    never = Refused(reason="its configuration is another one", is_final=True)
    side = member()
    assert side.on_reply(never, now=1.0) == TurnedAway(never.reason, is_final=True)
    assert side.session_id == "s"
    assert side.standing(now=1.0) is not Standing.OVER
    fresh = Allegiance(ABOUT, TERMS, KeepLimits(), now=0.0)
    assert fresh.on_reply(never, now=1.0) == TurnedAway(never.reason, is_final=True)


@pytest.mark.parametrize("is_member", [True, False])
def test_who_is_refused_for_now_lets_go_of_its_session_if_it_has_one(is_member):
    later = Refused(reason="another process speaks for node 1", is_final=False)
    side = member() if is_member else Allegiance(ABOUT, TERMS, KeepLimits(), now=0.0)
    over = SessionOver(later.reason) if is_member else TurnedAway(later.reason, is_final=False)
    assert side.on_reply(later, now=1.0) == over
    assert side.session_id == ""
    assert side.take(now=1.0) is None

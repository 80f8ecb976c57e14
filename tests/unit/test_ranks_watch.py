from typing import get_args

from libra.ids import PolicyVersion, Rank
from libra.wire.rank import (
    AbortTransfer,
    AcksJudged,
    Heartbeat,
    JudgeAcks,
    OfferWeights,
    RankCommand,
    TrainStep,
    WeightsOffered,
)
from libra_supervisor.ranks.watch import ANSWER_TO, UNANSWERED, RankWatch
from reload_messages import reload_request

ZERO, ONE = Rank(0), Rank(1)
VERDICT = AcksJudged(PolicyVersion(7), "nonce-1", (), {}, None, 0.0, 0.0)
JUDGE = JudgeAcks(reload_request(), ())


def training(watch: RankWatch) -> None:
    watch.on_sent([ZERO, ONE], TrainStep(1, ()), now=0.0)
    watch.on_sent([ZERO], JUDGE, now=1.0)


def test_a_verdict_is_no_sign_of_life_of_the_training_beside_it():
    watch = RankWatch(timeout_s=10.0)
    training(watch)
    watch.on_event(ONE, Heartbeat(1, 1, "train"), now=9.0)
    watch.on_event(ZERO, VERDICT, now=9.0)
    (silence,) = watch.silences(now=10.0)
    assert (silence.rank, silence.silent_s) == (ZERO, 10.0)


def test_a_rank_that_owes_a_verdict_alone_is_watched_too():
    watch = RankWatch(timeout_s=10.0)
    watch.on_sent([ZERO], JUDGE, now=1.0)
    assert watch.next_deadline() == 11.0
    watch.on_event(ZERO, VERDICT, now=2.0)
    assert watch.next_deadline() is None


def test_every_command_is_either_answered_or_owes_nothing():
    assert set(get_args(RankCommand)) == {*ANSWER_TO, *UNANSWERED}


def test_rank_0s_offer_settles_it_for_every_rank():
    watch = RankWatch(timeout_s=10.0)
    watch.on_sent([ZERO, ONE], OfferWeights("run", PolicyVersion(1), ()), now=0.0)
    watch.on_sent([ZERO], AbortTransfer("group", "why"), now=0.0)
    offered = WeightsOffered(PolicyVersion(1), "offer", False, (), "127.0.0.1", 1, (), 0.1)
    watch.on_event(ZERO, offered, now=1.0)
    assert watch.next_deadline() is None

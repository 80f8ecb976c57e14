import re

import msgspec
import pytest

from fleets import FIRST, SECOND, fleet_of, place
from libra.ids import InstanceId
from libra.scheduling.load import OwnLoad, RemoteLoad
from libra.scheduling.shared_view import FORMAT, RankLoad, SharedView

KEY = (InstanceId("i0"), FIRST)


def content(rank="1", *, sequence=1, writer="w1", num_requests=3, at_ns=0, incarnation=FIRST):
    return RankLoad(
        format=FORMAT,
        rank=rank,
        writer=writer,
        sequence=sequence,
        written_at_ns=at_ns,
        load=(OwnLoad(InstanceId("i0"), incarnation, num_requests, 100 * num_requests),),
    )


def view_with(*contents, now=0.0, ttl_s=30.0):
    view = SharedView(own_rank="0", own_writer="me", ttl_s=ttl_s)
    view.on_read({c.rank: c for c in contents}, now=now, wall_ns=0)
    return view


def test_the_others_are_summed_and_the_own_file_is_not_counted():
    view = view_with(content("1"), content("2", num_requests=4), content("0", writer="me"))
    assert view.remote_load(0.0) == {KEY: RemoteLoad(7, 700)}
    assert view.take_conflicts() == frozenset()


@pytest.mark.case("R-B84")
@pytest.mark.parametrize("skew_ns", [600 * 10**9, -600 * 10**9])
def test_a_dead_rank_vanishes_after_the_ttl_whatever_its_clock_said(skew_ns):
    dead = content(at_ns=skew_ns)
    view = view_with(dead)
    view.on_read({"1": dead}, now=29.0, wall_ns=29 * 10**9)
    assert view.remote_load(29.0) == {KEY: RemoteLoad(3, 300)}
    view.on_read({"1": dead}, now=30.0, wall_ns=30 * 10**9)
    assert view.remote_load(30.0) == {}
    assert view.live_ranks(30.0) == ()
    for k in range(3):
        view.on_read({"1": dead}, now=31.0 + 40 * k, wall_ns=0)
        assert view.remote_load(31.0 + 40 * k) == {}


@pytest.mark.case("R-B84")
def test_a_living_rank_with_a_wrong_clock_stays_and_its_skew_is_told():
    view = view_with(content(at_ns=600 * 10**9))
    for k in range(1, 10):
        beat = content(sequence=1 + k, at_ns=(600 + 10 * k) * 10**9)
        view.on_read({"1": beat}, now=10.0 * k, wall_ns=10 * k * 10**9)
    assert view.live_ranks(90.0) == ("1",)
    assert view.skew_s() == {"1": 600.0}


def test_a_file_that_is_unreadable_for_a_moment_keeps_its_last_content():
    view = view_with(content())
    view.on_read({}, now=5.0, wall_ns=0)
    assert view.remote_load(5.0) == {KEY: RemoteLoad(3, 300)}
    view.on_read({}, now=31.0, wall_ns=0)
    assert view.remote_load(31.0) == {}


def test_a_restarted_rank_counts_at_once_and_is_no_conflict():
    view = view_with(content(sequence=900))
    view.on_read({"1": content(writer="w2", sequence=1, num_requests=1)}, now=1.0, wall_ns=0)
    assert view.remote_load(1.0) == {KEY: RemoteLoad(1, 100)}
    assert view.take_conflicts() == frozenset()


def test_two_writers_with_one_rank_are_found_by_the_others():
    view = view_with(content())
    view.on_read({"1": content(writer="w2")}, now=1.0, wall_ns=0)
    view.on_read({"1": content(sequence=2)}, now=2.0, wall_ns=0)
    assert view.take_conflicts() == {"1"}
    assert view.take_conflicts() == frozenset()


def test_two_writers_with_one_rank_are_found_by_themselves():
    assert view_with(content("0", writer="another")).take_conflicts() == {"0"}


def test_load_on_an_earlier_incarnation_counts_for_nobody():
    scheduler = fleet_of(2)
    view = view_with(content(num_requests=50, incarnation=SECOND))
    scheduler.on_remote_load(view.remote_load(0.0), 0.0)
    assert {place(scheduler).instance_id for _ in range(2)} == {"i0", "i1"}


def test_remote_load_moves_requests_away_and_its_end_brings_them_back():
    scheduler = fleet_of(2)
    view = view_with(content(num_requests=4))
    scheduler.on_remote_load(view.remote_load(0.0), 0.0)
    assert [place(scheduler).instance_id for _ in range(4)] == ["i1"] * 4
    scheduler.on_remote_load(view.remote_load(30.0), 30.0)
    assert [place(scheduler).instance_id for _ in range(4)] == ["i0"] * 4


def test_nonsense_counts_never_make_a_load_negative():
    assert view_with(content(num_requests=-9)).remote_load(0.0) == {KEY: RemoteLoad(0, 0)}


@pytest.mark.parametrize("field", ["num_requests", "num_tokens", "sequence", "written_at_ns"])
def test_a_number_that_cannot_be_reckoned_with_makes_the_file_unreadable(field):
    text = msgspec.json.encode(content())
    assert text.count(f'"{field}":'.encode()) == 1
    huge = re.sub(f'"{field}":[0-9]+'.encode(), f'"{field}":{"9" * 400}'.encode(), text)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(huge, type=RankLoad)


def test_own_load_is_exact_and_leaves_out_what_is_idle():
    scheduler = fleet_of(3)
    held = place(scheduler, num_prompt_tokens=100, max_new_tokens=50)
    assert scheduler.own_load() == (OwnLoad(held.instance_id, FIRST, 1, 150),)
    scheduler.complete(held, 5, 0.0)
    assert scheduler.own_load() == ()


def test_the_file_survives_a_round_trip():
    file = content()
    assert msgspec.json.decode(msgspec.json.encode(file), type=RankLoad) == file


def test_kv_tokens_count_remote_tokens_against_capacity():
    scheduler = fleet_of(2, load_metric="kv_tokens", kv_capacity_tokens_by_tp={1: 1000})
    scheduler.on_remote_load({KEY: RemoteLoad(1, 400)}, 0.0)
    (first, _) = scheduler.instances(0.0)
    assert first.load == 0.4


def test_a_conflict_that_lasts_is_told_once_and_one_after_a_while_again():
    view = view_with(content("0", writer="me"), content())
    told = []
    for k in range(200):  # both find each other's file at each exchange
        writer = ("w1", "w2")[k % 2]
        files = {"0": content("0", writer="another"), "1": content(writer=writer, sequence=k)}
        view.on_read(files, now=1.0 + k, wall_ns=0)
        told += view.take_conflicts()
    assert sorted(told) == ["0", "1"]
    view.on_read({"0": content("0", writer="another")}, now=300.0, wall_ns=0)
    assert view.take_conflicts() == {"0"}

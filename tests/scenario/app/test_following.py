"""A follower's program where it must not begin."""

import os
import signal
import socket
import subprocess
import sys

import anyio
import msgspec
import pytest

from fake_runs import write_config
from leaders_end import RUN_ID, leading
from libra import clock
from libra.config.load import dump_resolved, load_config
from libra.errors import SiteError
from libra.ids import InstanceId, NodeRank, SlotId
from libra.planner.plan import InstancePlacement, Plan, TrainPlacement
from libra.storage.atomic import atomic_write
from libra.wire.node import Leave, StopAsked
from libra_supervisor.app.following import (
    Following,
    follow,
    node_directory,
    speaking_for,
)
from libra_supervisor.app.recall import record_run_id
from libra_supervisor.app.shared_config import config_digest, option_digests
from libra_supervisor.nodes.site import Site
from libra_supervisor.nodes.term import RunEnd, end_term, obey_term
from libra_supervisor.run_directory import LOCK_NAME, Holder, RunDirectory, held

HERE = os.uname().nodename
ADVICE = "correct nodes, or say with --node-rank which node this machine is"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def signals():
    kept = {it: signal.getsignal(it) for it in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def following(tmp_path, *, port=9, environ=None, **options):
    config = load_config(write_config(tmp_path, total_steps=1, **options), purpose="plan").config
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    node_directory(directory, 1).create()
    return Following(
        site=Site(hosts=("127.0.0.1", "127.0.0.2"), port=port, rank=1),
        config=config,
        environ=dict(os.environ) | (environ or {}),
        directory=directory,
        token="a token of these nodes",
        devices=(),
    )


async def test_a_machine_that_leads_is_no_follower_too_and_its_children_are_left_alone(tmp_path):
    told = following(tmp_path)
    record_run_id(told.directory, RUN_ID)
    env = {"LIBRA_RUN_ID": RUN_ID, "LIBRA_CHILD_ID": "vllm-0"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        with held(told.directory):
            outcome = await follow(told)
        assert outcome.exit_code == 5
        assert "leads this run on this very machine" in outcome.reason
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (None, "another libra-supervisor speaks for node 1 of this run already, and this is "),
        (
            "gpu07",
            f"on gpu07 speaks for node 1 of this run already, and this is {HERE}: {ADVICE}",
        ),
        (HERE, "speaks for node 1 of this run already: end that process first"),
    ],
)
def test_of_two_that_claim_a_rank_the_second_is_told_who_the_first_is(tmp_path, host, said):
    own = RunDirectory(tmp_path)
    with speaking_for(1, own):
        lock = tmp_path / LOCK_NAME
        lock.write_bytes(b"" if host is None else msgspec.json.encode(Holder(4711, host)))
        with pytest.raises(SiteError) as found, speaking_for(1, own):
            pass
    assert said in str(found.value)
    assert "--run-dir" not in str(found.value)
    with pytest.raises(KeyError), speaking_for(1, own):
        raise KeyError


def test_nodes_agree_on_all_that_is_not_their_own_affair(tmp_path):
    (tmp_path / "a").mkdir()
    same = config_digest(following(tmp_path / "a").config)
    paths = {"node_token_file": "/x", "node_tls_cert": "/c", "node_tls_key": "/k"}
    (tmp_path / "a" / "run.yaml").unlink()
    first = load_config(write_config(tmp_path / "a", total_steps=1), purpose="plan").config
    own = load_config(write_config(tmp_path / "a", total_steps=1, **paths), purpose="plan").config
    other = load_config(write_config(tmp_path / "a", total_steps=2), purpose="plan").config
    assert config_digest(first) == config_digest(own) == same
    assert config_digest(other) != same
    first, own, other = map(option_digests, (first, own, other))
    assert first == own
    assert {name for name, digest in other.items() if first[name] != digest} == {"total_steps"}
    assert {"supervision.term_grace_s", "model_path"} <= set(first)


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


async def outcome_after(told, story):
    """How the follower ended, which went on for as long as the story and what followed from it."""
    outcomes = []

    async def run():
        outcomes.append(await follow(told))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await story()
    return outcomes[0]


async def test_a_stop_while_no_run_has_begun_is_no_failure_and_says_so(tmp_path):
    told = following(tmp_path)
    outcome = await outcome_after(told, soon_stopped)
    assert (outcome.exit_code, outcome.reason) == (0, "SIGTERM, and no leader to end the run with")


async def soon_stopped():
    await clock.sleep(0.5)
    stop()


@pytest.mark.case("R-B77")
@pytest.mark.parametrize("has_run", [False, True])
async def test_while_it_waits_for_its_leader_systemd_is_asked_for_more_time(
    tmp_path, free_ports, has_run
):
    path = str(tmp_path / "notify")
    told = following(tmp_path, port=free_ports(1), environ={"NOTIFY_SOCKET": path}, node_lease_s=2)
    if has_run:
        record_run_id(told.directory, RUN_ID)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)

        async def story():
            await clock.sleep(0.5)
            said = received(manager)
            assert "EXTEND_TIMEOUT_USEC=60000000" in said
            assert f"STATUS=waits for its leader, 127.0.0.1 port {told.site.port}" in said
            assert not any("READY=1" in word for word in said)
            stop()

        await outcome_after(told, story)
        assert [word.partition("\n")[0] for word in received(manager)] == ["STOPPING=1"] * has_run


def received(manager):
    said = []
    while True:
        try:
            said.append(manager.recv(4096).decode())
        except BlockingIOError:
            return said


async def test_a_stop_that_no_leader_answers_is_carried_out_when_the_lease_ends(
    tmp_path, free_ports
):
    told = following(tmp_path, port=free_ports(1), node_lease_s=2)
    record_run_id(told.directory, RUN_ID)

    async def story():
        async with leading(told) as leader:
            await leader.until_joined()
            await clock.sleep(0.5)
        # It is gone, and the lease is held yet.
        stop()

    outcome = await outcome_after(told, story)
    assert (outcome.exit_code, outcome.reason) == (0, "SIGTERM, and no leader to end the run with")


async def test_a_leader_that_takes_over_after_a_stop_hears_of_it(tmp_path, free_ports):
    told = following(tmp_path, port=free_ports(1), node_lease_s=10)
    record_run_id(told.directory, RUN_ID)

    async def story():
        async with leading(told) as leader:
            await leader.until_joined()
            await clock.sleep(0.5)
        stop()
        async with leading(told, term=2) as leader:
            await leader.until_joined()
            await leader.until(lambda it: it.said)
            assert leader.said == [StopAsked("SIGTERM on node 1", in_hurry=False)]
            await clock.sleep(1.0)
            leader.end.tell(1, Leave(0, "stopped"))
            await leader.until(lambda it: not it.end.records[0].session.num_kept)

    outcome = await outcome_after(told, story)
    assert (outcome.exit_code, outcome.reason) == (0, "stopped")


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_machine_that_lacks_what_its_part_of_the_plan_needs_is_no_member_and_says_why(
    tmp_path, free_ports, is_taken
):
    base = free_ports(3)
    told = following(tmp_path, port=base, node_lease_s=2, rollout_port_base=base + 1)
    record_run_id(told.directory, RUN_ID)
    write_plan(told, over_two_nodes())
    with socket.create_server(("127.0.0.2" if is_taken else "127.0.0.1", base + 2)):

        async def story():
            async with leading(told) as leader:
                await leader.until_joined()
                if is_taken:
                    await leader.until(lambda it: it.said)
                    assert lacking in leader.said[0].reason
                    return
                await clock.sleep(1.0)
                assert leader.said == []
                stop()
                await leader.until(lambda it: it.said)
                leader.end.tell(1, Leave(0, "stopped"))
                await leader.until(lambda it: not it.end.records[0].session.num_kept)

        lacking = f"rollout_port_base: 127.0.0.2:{base + 2} is in use"
        outcome = await outcome_after(told, story)
    if is_taken:
        assert (outcome.exit_code, lacking in outcome.reason) == (5, True)
    else:
        assert (outcome.exit_code, outcome.reason) == (0, "stopped")


def write_plan(told, plan):
    """As the leader does."""
    atomic_write(told.directory.plan, msgspec.json.encode(plan))
    atomic_write(told.directory.resolved_config_json, dump_resolved(told.config))


def over_two_nodes():
    """A server on each node, ranks on the first."""
    train = TrainPlacement(tp=1, pp=1, cp=1, ep=1, dp=1, slots=(SlotId(1),))
    servers = tuple(
        InstancePlacement(
            instance_id=InstanceId(f"vllm-{node}"), tp=1, slots=(SlotId(0),), node=NodeRank(node)
        )
        for node in range(2)
    )
    return Plan(strategy="configured", train=train, instances=servers)


@pytest.mark.parametrize(
    ("term", "by"), [(1, "L1"), (1, "another leader of that term"), (2, "a later leader")]
)
async def test_a_node_that_the_leader_could_not_tell_reads_of_the_end_of_the_run(
    tmp_path, free_ports, term, by
):
    told = impatient(tmp_path, free_ports)

    async def story():
        # Of the life before: nobody is sent home by it.
        end_term(told.directory.root, 1, "L0", RunEnd(0, "all steps are trained"))
        async with leading(told) as leader:
            await leader.until_joined()
            await clock.sleep(0.5)
        end_term(told.directory.root, term, by, RunEnd(4, "a child failed"))

    outcome = await outcome_after(told, story)
    known = (4, "the run is over: a child failed")
    is_known = by != "another leader of that term"
    assert (outcome.exit_code, outcome.reason) == (known if is_known else ALONE)


def impatient(tmp_path, free_ports):
    """It waits for few seconds where others wait for minutes."""
    told = following(tmp_path, port=free_ports(1), node_lease_s=1, node_orphan_grace_s=1)
    supervision = msgspec.structs.replace(told.config.supervision, start_timeout_s=4)
    config = msgspec.structs.replace(told.config, supervision=supervision)
    record_run_id(told.directory, RUN_ID)
    return msgspec.structs.replace(told, config=config)


ALONE = (5, "no leader for 4 s after the servers here were ended")


@pytest.mark.parametrize("has_obeyed", [False, True])
@pytest.mark.parametrize("ends_again", [False, True])
async def test_who_never_joined_reads_of_an_end_too_and_not_of_that_of_a_life_before(
    tmp_path, free_ports, has_obeyed, ends_again
):
    told = impatient(tmp_path, free_ports)
    end_term(told.directory.root, 1, "L1", RunEnd(0, "all steps are trained"))
    if has_obeyed:
        obey_term(node_directory(told.directory, 1).root, 1, "L1")

    async def story():
        await clock.sleep(1.0)
        if ends_again:
            end_term(told.directory.root, 2, "L2", RunEnd(4, "a child failed"))

    outcome = await outcome_after(told, story)
    known = (4, "the run is over: a child failed")
    assert (outcome.exit_code, outcome.reason) == (known if ends_again else ALONE)


async def test_who_is_a_member_is_told_of_the_end_and_reads_it_nowhere(tmp_path, free_ports):
    told = impatient(tmp_path, free_ports)

    async def story():
        async with leading(told) as leader:
            await leader.until_joined()
            await clock.sleep(0.5)
            end_term(told.directory.root, 1, "L1", RunEnd(4, "a child failed"))
            await clock.sleep(3.0)
            leader.end.tell(1, Leave(0, "stopped"))
            await leader.until(lambda it: not it.end.records[0].session.num_kept)

    outcome = await outcome_after(told, story)
    assert (outcome.exit_code, outcome.reason) == (0, "stopped")

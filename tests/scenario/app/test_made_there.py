"""Trajectories made on another node: fake servers, all else but the network is real."""

import json

import anyio
import msgspec
import pytest

from libra.ids import GroupId
from libra.rollouts.group import AdmittedGroup, PromptRef
from libra.rollouts.seeds import sampling_seed
from libra.rollouts.trajectory import alignment_error
from libra.tracing.chrome import read_trace, trace_files
from libra.tracing.span import Phase
from libra.wire import node as node_wire
from libra_supervisor.app import node_making
from libra_supervisor.app import spread_rollouts as spread_module
from libra_supervisor.events import SampleFinished, SampleGaveUp, SampleProgressed, SampleStarted
from libra_supervisor.nodes.follower import FollowerEnd
from made_there import made_there
from processes import until
from trajectories import admitted

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
def anyio_backend():
    return "asyncio", {"use_uvloop": True}


HERE, THERE = admitted(0, n_samples=16), admitted(1, n_samples=4)
"""The first group is made by the leader's node, the second and further ones by the other."""


async def start_there(made, group=THERE):
    made.rollouts.start(HERE)
    made.rollouts.start(group)
    assert made.own.started == {HERE.group_id: tuple(range(16))}
    assert made.rollouts.node_of(group.group_id) == 1


def seeds_of(made, group, indices):
    seed = made.config.control.seed
    return {sampling_seed(seed, group, sample_index=it, turn=1) for it in indices}


def asked(server):
    return {body["seed"] for body in server.completion_bodies}


async def test_a_group_that_another_node_makes_has_the_names_seeds_and_rewards_it_has_anywhere(
    tmp_path,
):
    unused = ("heterogeneous_rollout.scheduling.metrics_poll_interval_s=0.01",)
    async with made_there(tmp_path, overrides=unused) as made:
        await start_there(made)
        await until(lambda: len(made.of(SampleFinished)) == 4, within_s=20)
        made.each_once()
        assert asked(made.servers["vllm-0"]) == seeds_of(made, THERE, range(4))
        found = made.trajectories()
        assert set(found) == {THERE.trajectory_id(index) for index in range(4)}
        task = made.prompts.dataset.task(1)
        for trajectory in found.values():
            assert alignment_error(trajectory) is None
            assert trajectory.token_ids[: trajectory.num_prompt_tokens] == task.prompt_token_ids
            assert trajectory.reward is not None
            assert trajectory.instance_ids == ("vllm-0",)
            assert {span.policy_version for span in trajectory.version_spans} == {0}
        assert set(made.served) == {"vllm-0"}
        assert made.rollouts.node_of(THERE.group_id) is None
        assert len(made.of(SampleStarted)) == 4
        assert ("GET", "/metrics") not in made.servers["vllm-0"].calls
    requests_are_in_the_trace(tmp_path / "run")


def requests_are_in_the_trace(run_dir):
    [path] = trace_files(run_dir)
    assert path.name == "phase_trace_node1.jsonl"
    [(header, spans)] = read_trace(path)
    assert (header.role, header.rank) == ("node 1", -1)
    routed = [span for span in spans if span.phase == Phase.ROUTE]
    assert len({span.args["request"] for span in routed}) == 4
    assert {span.phase for span in spans} <= {Phase.ROUTE, Phase.QUEUE_WAIT}
    assert all(span.track.startswith("vllm-0") for span in routed)


async def test_an_evaluation_is_made_there_of_its_own_data(tmp_path):
    data = tmp_path / "eval.jsonl"
    data.write_text('{"prompt": "symbols and digits", "answer": "digits"}\n')
    async with made_there(tmp_path, eval_data=str(data), eval_interval=1) as made:
        group = AdmittedGroup(PromptRef("eval-0", 0, 0), 0, 1)
        made.rollouts.start(HERE)
        made.rollouts.start(group)
        assert made.evaluations.orders == []
        await until(lambda: made.of(SampleFinished), within_s=20)
        (trajectory,) = made.trajectories().values()
        given = trajectory.token_ids[: trajectory.num_prompt_tokens]
        assert given == made.prompts.evaluated.task(0).prompt_token_ids


async def test_a_long_trajectory_comes_in_pieces_and_one_that_is_too_long_not_at_all(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(node_making, "MAX_PIECE_BYTES", 37)
    async with made_there(tmp_path) as made:
        await start_there(made)
        await until(lambda: len(made.of(SampleFinished)) == 4, within_s=20)
        whole = made.trajectories()[THERE.trajectory_id(0)]
        assert len(msgspec.msgpack.encode(whole)) > 5 * 37
        assert alignment_error(whole) is None
        assert made.rollouts._pieces == {1: {}}
        monkeypatch.setattr(node_making, "MAX_TRAJECTORY_BYTES", 30)
        made.rollouts.start(admitted(2, n_samples=2))
        assert made.rollouts.node_of(admitted(2).group_id) == 1
        await until(lambda: made.of(SampleGaveUp), within_s=20)
        assert "too long to be passed on" in made.of(SampleGaveUp)[0].failure.message


async def test_a_node_that_let_go_makes_nothing_of_before_and_takes_part_again(tmp_path):
    async with made_there(tmp_path) as made:
        server = made.servers["vllm-0"]
        server.freeze_tokens = True
        await start_there(made)
        await until(lambda: server.num_running == 4)
        await made.nodes.hands.let_go("the lease has ended")
        # Under the session that goes on the leader hears of it and has the rest made elsewhere.
        await until(lambda: THERE.group_id in made.own.started)
        assert made.own.started[THERE.group_id] == (0, 1, 2, 3)
        await until(lambda: server.num_running == 0)
        assert server.num_aborted == 4
        server.freeze_tokens = False
        await made.until_able()
        made.rollouts.start(admitted(2))
        await until(lambda: len(made.of(SampleFinished)) == 2, within_s=20)
        made.each_once()


async def test_what_a_lost_node_has_not_finished_is_made_here_and_the_rest_is_kept(tmp_path):
    async with made_there(tmp_path) as made:
        server = made.servers["vllm-0"]
        await start_there(made)
        await until(lambda: made.of(SampleStarted))
        server.freeze_tokens = True
        more = admitted(2, n_samples=4)
        made.rollouts.start(more)
        await until(lambda: made.rollouts.node_of(more.group_id) == 1 and server.num_running >= 4)
        finished = set(made.trajectories())
        made.nodes.net.is_silent = True
        await until(lambda: more.group_id in made.own.started, within_s=30)
        assert made.own.started[more.group_id] == (0, 1, 2, 3)
        made.nodes.net.mend()
        await made.until_able()
        await until(lambda: server.num_running == 0)
        assert finished <= set(made.trajectories())
        assert not [it for it in made.trajectories() if it.startswith(more.group_id)]
        # Made here they begin a second time, which is no news but a sign of life.
        before = len(made.of(SampleStarted))
        await made.rollouts.on_own(SampleStarted(more.group_id, 0))
        assert len(made.of(SampleStarted)) == before
        assert made.of(SampleProgressed)[-1] == SampleProgressed(more.group_id, 0)
        made.each_once()


async def test_a_group_that_nobody_wants_any_more_frees_its_server(tmp_path):
    async with made_there(tmp_path) as made:
        server = made.servers["vllm-0"]
        server.freeze_tokens = True
        await start_there(made)
        await until(lambda: server.num_running == 4 and made.in_flight("vllm-0") == 4)
        made.rollouts.cancel(THERE.group_id)
        await until(lambda: server.num_running == 0 and made.in_flight("vllm-0") == 0)
        server.freeze_tokens = False
        again = admitted(1, attempt=1)
        made.rollouts.start(again)
        await until(lambda: len(made.of(SampleFinished)) == 2, within_s=20)
        assert {it.group_id for it in made.trajectories().values()} == {again.group_id}
        made.each_once()


async def test_a_group_begins_anew_while_the_last_words_of_before_are_still_on_their_way(
    tmp_path, monkeypatch
):
    may_speak, say_when_room = anyio.Event(), FollowerEnd.say_when_room

    async def when_it_may(end, event):
        await may_speak.wait()
        await say_when_room(end, event)

    monkeypatch.setattr(FollowerEnd, "say_when_room", when_it_may)
    async with made_there(tmp_path) as made:
        server = made.servers["vllm-0"]
        await start_there(made)
        await until(lambda: len(server.completion_bodies) == 4 and server.num_running == 0)
        await until(lambda: len(made.of(SampleStarted)) == 4)
        await until(lambda: made.in_flight("vllm-0") == 0)
        made.rollouts.cancel(THERE.group_id)
        made.posted.clear()
        made.rollouts.start(THERE)
        await until(lambda: len(server.completion_bodies) == 8)
        may_speak.set()
        await until(lambda: len(made.of(SampleFinished)) == 4, within_s=20)
        made.each_once()


async def test_samples_that_are_asked_for_again_begin_anew_there(tmp_path):
    async with made_there(tmp_path) as made:
        server = made.servers["vllm-0"]
        server.freeze_tokens = True
        await start_there(made)
        await until(lambda: server.num_running == 4)
        made.rollouts.ask_again(THERE.group_id, (1, 2))
        await until(lambda: server.num_aborted == 2 and server.num_running == 4)
        server.freeze_tokens = False
        await until(lambda: len(made.of(SampleFinished)) == 4, within_s=20)
        made.each_once()
        assert len(server.completion_bodies) == 6


@pytest.mark.case("R-B90")
async def test_requests_go_to_no_server_that_is_older_than_what_is_wanted(tmp_path):
    async with made_there(tmp_path, servers=("vllm-0", "vllm-1")) as made:
        # The second has missed version 3, and nobody has taken it out of routing.
        made.servers["vllm-0"].version = 3
        made.know("vllm-0", version=3)
        await start_there(made)
        await until(lambda: len(made.of(SampleFinished)) == 4, within_s=20)
        assert made.servers["vllm-1"].completion_bodies == []
        versions = {s.policy_version for t in made.trajectories().values() for s in t.version_spans}
        assert versions == {3}


@pytest.mark.case("R-B29")
async def test_a_server_that_leaves_is_used_until_every_node_has_read_it_and_is_empty(tmp_path):
    async with made_there(tmp_path, servers=("vllm-0", "vllm-1")) as made:
        for server in made.servers.values():
            server.freeze_tokens = True
        await start_there(made)
        await until(lambda: made.in_flight("vllm-0") == 2 and made.in_flight("vllm-1") == 2)
        made.withdraw("vllm-0")
        # Until the other node has read it a request may be on its way there.
        assert made.in_flight("vllm-0") == 3
        await until(lambda: made.in_flight("vllm-0") == 2)
        made.servers["vllm-0"].freeze_tokens = False
        await until(lambda: made.in_flight("vllm-0") == 0)
        made.rollouts.start(admitted(2))
        await until(lambda: made.in_flight("vllm-1") == 4)
        assert made.in_flight("vllm-0") == 0


async def test_what_is_in_flight_on_a_server_that_leaves_at_once_is_placed_anew(tmp_path):
    async with made_there(tmp_path, servers=("vllm-0", "vllm-1")) as made:
        leaving, staying = made.servers.values()
        leaving.freeze_tokens = staying.freeze_tokens = True
        await start_there(made)
        await until(lambda: leaving.num_running == 2 and staying.num_running == 2)
        made.withdraw("vllm-0")
        made.rollouts.give_back("vllm-0")
        await until(lambda: leaving.num_running == 0 and staying.num_running == 4)
        await until(lambda: made.in_flight("vllm-0") == 0)
        staying.freeze_tokens = False
        await until(lambda: len(made.of(SampleFinished)) == 4, within_s=20)
        made.each_once()
        assert {it.instance_ids for it in made.trajectories().values()} == {("vllm-1",)}


async def test_a_server_that_is_replaced_answers_under_its_new_address(tmp_path):
    async with made_there(tmp_path, servers=("vllm-0", "vllm-1")) as made:
        made.rollouts.roster.forget("vllm-1")
        made.withdraw("vllm-0", is_draining=False)
        before = made.servers["vllm-0"]
        await before.stop()
        await start_there(made)
        await made.serve("vllm-0")
        assert made.servers["vllm-0"].url != before.url
        made.know("vllm-0", version=0, incarnation="b")
        await until(lambda: len(made.of(SampleFinished)) == 4, within_s=20)
        assert len(made.servers["vllm-0"].completion_bodies) == 4
        assert made.servers["vllm-1"].completion_bodies == []


async def test_a_node_whose_reward_does_not_load_gets_nothing_and_says_why(tmp_path):
    reward = ("reward=no_such_module:reward",)
    async with made_there(tmp_path, begins=False, overrides=reward) as made:
        made.begin()
        await until(made.why_not, within_s=60)
        assert "no_such_module" in made.why_not()
        assert not made.is_able
        made.rollouts.start(HERE)
        made.rollouts.start(THERE)
        assert set(made.own.started) == {HERE.group_id, THERE.group_id}


async def test_a_node_with_other_data_gets_nothing(tmp_path):
    async with made_there(tmp_path, begins=False) as made:
        data = tmp_path / "train.jsonl"
        rows = [json.loads(line) for line in data.read_text().splitlines()]
        data.write_text("".join(f"{json.dumps(row)}\n" for row in reversed(rows)))
        made.begin()
        await until(made.why_not, within_s=60)
        assert "not those of the leader" in made.why_not()
        assert not made.is_able


async def test_a_node_whose_reward_breaks_later_gives_back_what_it_has(tmp_path):
    (tmp_path / "frail.py").write_text(
        "import os\n"
        "from pathlib import Path\n"
        "if Path(__file__).with_name('broken').exists():\n"
        "    raise RuntimeError('its disk is full')\n"
        "def reward(case):\n"
        "    os._exit(1)\n"
    )
    async with made_there(tmp_path, overrides=("reward=frail:reward",)) as made:
        (tmp_path / "broken").touch()
        await start_there(made)
        await until(made.why_not, within_s=60)
        assert "its disk is full" in made.why_not()
        # Words that were on their way to it do no harm.
        made.know("vllm-0", incarnation="b")
        made.nodes.node.say(made.rollouts.roster.whole())
        await made.nodes.node.ask(node_wire.Lines, lambda call: node_wire.Tail(call, "x", 1))
        left = made.own.started[THERE.group_id]
        assert len(left) == 4 - len(made.of(SampleGaveUp))
        made.each_once()


async def test_schedulers_of_all_nodes_leave_their_load_in_the_run_directory(tmp_path):
    async with made_there(tmp_path) as made:
        made.servers["vllm-0"].freeze_tokens = True
        await start_there(made)
        path = made.directory.shared_load / f"load_{made.place.run_id}-1.json"

        def load():
            return json.loads(path.read_text())["load"] if path.exists() else []

        await until(lambda: [(it["instance_id"], it["num_requests"]) for it in load()] == [
            ("vllm-0", 4)
        ])  # fmt: skip
        made.rollouts.cancel_all("the run is over")
        assert ("cancel", GroupId(HERE.group_id)) in made.own.orders
        await until(lambda: made.servers["vllm-0"].num_running == 0)


async def test_feedback_is_read_by_each_node_itself(tmp_path):
    key = "heterogeneous_rollout.scheduling"
    feedback = (f"{key}.enable_metrics_feedback=true", f"{key}.metrics_poll_interval_s=0.05")
    async with made_there(tmp_path, overrides=feedback) as made:
        server = made.servers["vllm-0"]
        await until(lambda: ("GET", "/metrics") in server.calls)


async def test_a_node_with_other_data_takes_part_once_it_has_those_of_the_leader(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(spread_module, "_FIRST_PAUSE_S", 1.0)
    async with made_there(tmp_path, begins=False) as made:
        data = tmp_path / "train.jsonl"
        right = data.read_text()
        data.write_text(right.replace("digits", "letters"))
        made.begin()
        await until(lambda: "its data are not those of the leader" in made.why_not(), within_s=60)
        data.write_text(right)
        await made.until_able()
        assert made.why_not() == ""

import os
import signal
from contextlib import asynccontextmanager
from random import Random

import anyio
import pytest
from structlog.testing import capture_logs

from libra.errors import ChildError
from libra.ids import ChildId
from libra_supervisor.events import (
    ChildExited,
    ChildGaveUp,
    ChildReady,
    ChildRestartScheduled,
    ChildStarted,
    ChildSuspected,
    ChildWaiting,
)
from libra_supervisor.process.lifecycle import Adoptee, ChildHooks, ChildState, Deadlines
from libra_supervisor.process.restart import RestartBudget, RestartPolicy
from libra_supervisor.process.supervise import Supervision
from libra_supervisor.process.tree import StopDeadlines
from processes import alive, python, site, until

pytestmark = pytest.mark.anyio
QUICK = RestartPolicy(
    backoff_initial_s=0.01, backoff_max_s=0.05, max_in_window=3, max_without_progress=9
)
SHORT = Deadlines(
    start_timeout_s=5,
    drain_timeout_s=5,
    stop=StopDeadlines(term_grace_s=2, kill_wait_s=5, hurried_grace_s=0.1),
)


class Hooks(ChildHooks):
    def __init__(self, place, *argvs, **changes):
        self.place, self.argvs, self.changes = place, list(argvs), changes
        self.hindrances, self.calls = [], []
        self.stuck = anyio.Event()

    async def spec(self, incarnation):
        argv = self.argvs.pop(0) if len(self.argvs) > 1 else self.argvs[0]
        return self.place.spec(*argv, **self.changes)

    async def hindrance(self):
        return self.hindrances.pop(0) if self.hindrances else None

    async def until_stuck(self, child):
        await self.stuck.wait()
        self.stuck = anyio.Event()
        return "no progress for 120 s"

    async def drain(self, child):
        self.calls.append("drain")

    async def dump(self, child):
        self.calls.append("dump")


@asynccontextmanager
async def supervised(place, hooks, *, policy=QUICK, deadlines=SHORT, adopt=None):
    supervision = Supervision(
        ChildId("child"),
        hooks,
        spawner=place.spawner,
        budget=RestartBudget(policy),
        deadlines=deadlines,
        post=place.post,
        rng=Random(1),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervision.run, adopt)
        yield supervision
        with anyio.fail_after(12):
            await supervision.until_down()


def kinds(place):
    return [type(event).__name__.removeprefix("Child") for event in place.posted]


def of(place, kind):
    return [event for event in place.posted if isinstance(event, kind)]


@pytest.mark.case("R-B47")
async def test_exit_code_zero_that_nobody_asked_for_is_a_failure(tmp_path):
    async with site(tmp_path) as place:
        async with supervised(place, Hooks(place, python("speak.py", "hi", "1", "0"))) as it:
            pass
        assert it.status().state is ChildState.GAVE_UP
        exits = of(place, ChildExited)
        assert [(e.exit_code, e.asked_for) for e in exits] == [(0, False)] * 4
        assert len({e.incarnation for e in exits}) == 4
        (gave_up,) = of(place, ChildGaveUp)
        assert gave_up.first_cause == "exited with code 0"
        assert gave_up.num_failures == 4
        assert set(gave_up.last_lines) == {"hi", "last words"}
        assert [e.num_recent_restarts for e in of(place, ChildRestartScheduled)] == [1, 2, 3]


@pytest.mark.case("R-B100")
async def test_a_stop_drains_asks_once_and_is_not_a_failure(tmp_path):
    script = "trap 'exit 0' TERM; while :; do sleep 0.02; done"
    async with site(tmp_path) as place:
        hooks = Hooks(place, ("/bin/sh", "-c", script))
        async with supervised(place, hooks) as it:
            await until(lambda: of(place, ChildReady))
            await anyio.sleep(0.1)
            it.stop()
        assert kinds(place) == ["Started", "Ready", "Exited"]
        assert of(place, ChildExited)[0].asked_for
        assert of(place, ChildExited)[0].exit_code == 0
        assert hooks.calls == ["drain"]
        assert it.status().state is ChildState.DOWN


@pytest.mark.case("R-B54")
async def test_a_second_stop_cuts_the_drain_and_the_grace_short(tmp_path):
    class Slow(Hooks):
        async def drain(self, child):
            await anyio.sleep(60)

    deadlines = Deadlines(
        drain_timeout_s=60, stop=StopDeadlines(term_grace_s=60, hurried_grace_s=0.1)
    )
    async with site(tmp_path) as place:
        hooks = Slow(place, python("tree.py", "1", "1", "ignore", "setsid"))
        began_at = anyio.current_time()
        async with supervised(place, hooks, deadlines=deadlines) as it:
            pid = (await until(lambda: of(place, ChildStarted)))[0].pid
            await anyio.sleep(0.3)
            it.stop()
            await anyio.sleep(0.1)
            it.stop()
        assert anyio.current_time() - began_at < 8
        assert alive([pid]) == []


@pytest.mark.case("R-B54", "R-B55", "R-B64")
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.2])
async def test_a_stop_at_any_moment_of_the_start_leaves_nothing(tmp_path, after_s):
    class NeverReady(Hooks):
        async def until_ready(self, child):
            await anyio.sleep_forever()

    async with site(tmp_path) as place:
        async with supervised(place, NeverReady(place, python("tree.py", "2", "2"))) as it:
            await anyio.sleep(after_s)
            it.stop()
        assert alive([e.pid for e in of(place, ChildStarted)]) == []
        assert all(e.asked_for for e in of(place, ChildExited))
        ended = await place.spawner.clear(ChildId("child"), 1.0)
        assert ended.num_killed == 0, "the supervision itself had ended all of it"


async def test_a_child_that_is_never_ready_is_replaced_at_its_deadline(tmp_path):
    class ReadyAtTheSecond(Hooks):
        starts = 0

        async def until_ready(self, child):
            self.starts += 1
            if self.starts == 1:
                await anyio.sleep_forever()

    deadlines = Deadlines(start_timeout_s=0.2, stop=StopDeadlines(term_grace_s=1))
    async with site(tmp_path) as place:
        hooks = ReadyAtTheSecond(place, ("sleep", "60"))
        async with supervised(place, hooks, deadlines=deadlines) as it:
            await until(lambda: of(place, ChildReady))
            it.stop()
        assert [e.reason for e in of(place, ChildSuspected)] == ["not ready within 0.2 s"]
        assert "not ready within 0.2 s (killed by SIGTERM)" in it.status().last_error


@pytest.mark.case("R-B45")
async def test_a_stuck_child_is_dumped_ended_and_replaced(tmp_path):
    async with site(tmp_path) as place:
        hooks = Hooks(place, ("sleep", "60"))
        async with supervised(place, hooks) as it:
            await until(lambda: of(place, ChildReady))
            hooks.stuck.set()
            await until(lambda: len(of(place, ChildReady)) == 2)
            it.stop()
        assert hooks.calls == ["dump", "drain"]
        pids = [e.pid for e in of(place, ChildStarted)]
        assert len(set(pids)) == 2
        assert alive(pids) == []


async def test_a_sigstopped_child_is_ended_too(tmp_path):
    async with site(tmp_path) as place:
        async with supervised(place, Hooks(place, ("sleep", "60"))) as it:
            pid = (await until(lambda: of(place, ChildStarted)))[0].pid
            os.kill(pid, signal.SIGSTOP)
            it.stop()
        assert alive([pid]) == []


@pytest.mark.case("R-B50")
async def test_waiting_for_a_device_costs_nothing_of_the_budget(tmp_path):
    async with site(tmp_path) as place:
        hooks = Hooks(place, ("sleep", "60"))
        hooks.hindrances = ["GPU 3 still holds 115 GiB", "GPU 3 still holds 96 GiB"]
        with capture_logs() as logs:
            async with supervised(place, hooks) as it:
                await until(lambda: of(place, ChildReady))
                it.stop()
        said = [line["why"] for line in logs if line["event"] == "start_waits"]
        assert said == ["GPU 3 still holds 115 GiB"]
        assert kinds(place)[:4] == ["Waiting", "Waiting", "Started", "Ready"]
        assert of(place, ChildWaiting)[0].reason == "GPU 3 still holds 115 GiB"
        assert it.status().num_failures == 0


@pytest.mark.case("R-B50")
async def test_a_restart_asked_for_while_a_start_waits_is_that_start(tmp_path):
    class Gated(Hooks):
        num_looks, is_open = 0, False

        async def hindrance(self):
            self.num_looks += 1
            return None if self.is_open else "GPU 3 still holds 115 GiB"

    async with site(tmp_path) as place:
        hooks = Gated(place, ("sleep", "60"))
        async with supervised(place, hooks) as it:
            await until(lambda: of(place, ChildWaiting))
            it.restart()
            await anyio.sleep(0.3)
            assert hooks.num_looks <= 3, "it looks again once and waits on"
            hooks.is_open = True
            it.restart()
            await until(lambda: of(place, ChildReady))
            await anyio.sleep(0.2)
            assert kinds(place) == ["Waiting", "Started", "Ready"]
            it.stop()


@pytest.mark.case("R-B64")
async def test_a_stop_ends_a_start_that_waits(tmp_path):
    class Closed(Hooks):
        async def hindrance(self):
            return "GPU 3 still holds 115 GiB"

    async with site(tmp_path) as place:
        async with supervised(place, Closed(place, ("sleep", "60"))) as it:
            await until(lambda: of(place, ChildWaiting))
            it.stop()
        assert kinds(place) == ["Waiting"]
        assert it.status().state is ChildState.DOWN


async def test_a_restart_on_purpose_drains_and_costs_nothing(tmp_path):
    async with site(tmp_path) as place:
        hooks = Hooks(place, ("sleep", "60"))
        async with supervised(place, hooks) as it:
            for k in (1, 2, 3, 4, 5):
                await until(lambda k=k: len(of(place, ChildReady)) == k)
                it.restart()
            await until(lambda: len(of(place, ChildReady)) == 6)
            it.stop()
        assert all(e.asked_for for e in of(place, ChildExited))
        assert it.status().num_failures == 0


async def test_a_program_that_cannot_start_uses_up_the_budget_and_names_the_reason(tmp_path):
    async with site(tmp_path) as place:
        async with supervised(place, Hooks(place, ("/no/program",))) as it:
            pass
        assert it.status().state is ChildState.GAVE_UP
        assert "/no/program" in of(place, ChildGaveUp)[0].first_cause


async def test_a_spec_that_cannot_be_made_is_a_failure_like_any_other(tmp_path):
    class NoPort(Hooks):
        async def spec(self, incarnation):
            raise ChildError("no free port between 8000 and 8010")

    async with site(tmp_path) as place:
        async with supervised(place, NoPort(place)):
            pass
        assert of(place, ChildGaveUp)[0].first_cause == "no free port between 8000 and 8010"


@pytest.mark.case("R-B74")
async def test_an_adopted_process_is_watched_and_replaced_by_one_only(tmp_path):
    async with site(tmp_path) as place:
        first = await place.spawn("sleep", "60")
        adopt = Adoptee(identity=first.identity, incarnation=first.incarnation)
        async with supervised(place, Hooks(place, ("sleep", "60")), adopt=adopt) as it:
            await until(lambda: of(place, ChildStarted))
            assert of(place, ChildStarted)[0].is_adopted
            os.kill(first.identity.pid, signal.SIGKILL)
            await until(lambda: len(of(place, ChildStarted)) == 2)
            first.reap()
            it.stop()
        assert [e.asked_for for e in of(place, ChildExited)] == [False, True]
        assert "adopted" in of(place, ChildExited)[0].reason


@pytest.mark.case("R-B74")
async def test_a_process_that_cannot_be_adopted_is_ended_before_the_new_one_starts(tmp_path):
    async with site(tmp_path) as place:
        left = await place.spawn("sleep", "60")
        forged = left.identity.__class__(left.identity.pid, 1, left.identity.boot_id)
        hooks = Hooks(place, ("sleep", "60"))
        adopt = Adoptee(identity=forged, incarnation=left.incarnation)
        async with supervised(place, hooks, adopt=adopt) as it:
            await until(lambda: of(place, ChildStarted))
            assert alive([left.identity.pid]) == []
            left.reap()
            it.stop()


async def test_cancelling_the_supervision_ends_the_tree(tmp_path):
    async with site(tmp_path) as place:
        hooks = Hooks(place, python("tree.py", "2", "1", "ignore", "setsid"))
        async with anyio.create_task_group() as tasks, supervised(place, hooks):
            pid = (await until(lambda: of(place, ChildReady))) and of(place, ChildStarted)[0].pid
            await anyio.sleep(0.3)
            tasks.cancel_scope.cancel()
        assert alive([pid]) == []
        ended = await place.spawner.clear(ChildId("child"), 1.0)
        assert ended.num_killed == 0


@pytest.mark.parametrize("fails_at", [ChildStarted, ChildReady])
async def test_an_error_of_those_who_listen_leaves_no_child(tmp_path, fails_at):
    async with site(tmp_path) as place:
        hooks = Hooks(place, python("tree.py", "1", "1", "ignore", "setsid"))

        async def fail(event):
            place.posted.append(event)
            if isinstance(event, fails_at):
                raise OSError("the journal is broken")

        place.post = fail
        with pytest.raises(ExceptionGroup):
            async with supervised(place, hooks):
                pass
        assert alive([of(place, ChildStarted)[0].pid]) == []
        ended = await place.spawner.clear(ChildId("child"), 1.0)
        assert ended.num_killed == 0


async def test_cancelling_while_it_drains_ends_the_tree(tmp_path):
    class Slow(Hooks):
        async def drain(self, child):
            await anyio.sleep(60)

    async with site(tmp_path) as place:
        hooks = Slow(place, python("tree.py", "1", "1", "setsid"))
        async with anyio.create_task_group() as tasks, supervised(place, hooks) as it:
            await until(lambda: of(place, ChildReady))
            it.stop()
            await anyio.sleep(0.3)
            assert it.status().state is ChildState.STOPPING
            tasks.cancel_scope.cancel()
        assert alive([of(place, ChildStarted)[0].pid]) == []
        assert (await place.spawner.clear(ChildId("child"), 1.0)).num_killed == 0


@pytest.mark.case("R-B74")
async def test_an_adopted_process_that_does_not_prove_itself_is_replaced(tmp_path):
    """Another server answers on its port, or it hangs: its deadline is that of a live server."""

    class Prover(Hooks):
        proofs = 0

        async def until_ready(self, child):
            self.proofs += 1
            if self.proofs == 1:
                await anyio.sleep_forever()

    deadlines = Deadlines(
        start_timeout_s=60, adopt_timeout_s=0.2, stop=StopDeadlines(term_grace_s=2)
    )
    async with site(tmp_path) as place:
        first = await place.spawn("sleep", "60")
        adopt = Adoptee(identity=first.identity, incarnation=first.incarnation)
        hooks = Prover(place, ("sleep", "60"))
        async with supervised(place, hooks, deadlines=deadlines, adopt=adopt) as it:
            await until(lambda: of(place, ChildReady))
            assert alive([first.identity.pid]) == []
            first.reap()
            it.stop()
        assert kinds(place)[:5] == ["Started", "Suspected", "Exited", "RestartScheduled", "Started"]
        assert of(place, ChildSuspected)[0].reason == "not ready within 0.2 s"


async def test_an_adopted_process_that_was_still_loading_has_as_long_as_a_new_one(tmp_path):
    class Loads(Hooks):
        async def take_over(self, facts):
            self.calls.append(facts)

        async def until_ready(self, child):
            await anyio.sleep(0.3)

    deadlines = Deadlines(
        start_timeout_s=5, adopt_timeout_s=0.1, stop=StopDeadlines(term_grace_s=2)
    )
    async with site(tmp_path) as place:
        first = await place.spawn("sleep", "60")
        adopt = Adoptee(
            identity=first.identity,
            incarnation=first.incarnation,
            was_ready=False,
            facts={"url": "http://127.0.0.1:1"},
        )
        hooks = Loads(place, ("sleep", "60"))
        async with supervised(place, hooks, deadlines=deadlines, adopt=adopt) as it:
            ready = await until(lambda: of(place, ChildReady))
            assert (ready[0].incarnation, ready[0].start_s) == (first.incarnation, 0.0)
            assert hooks.calls == [{"url": "http://127.0.0.1:1"}]
            it.stop()
        assert kinds(place) == ["Started", "Ready", "Exited"]
        first.reap()

"""Plans that a test wants of a run in another process: a file for each, taken in order.

want(run_dir, plan, decision_id=1)      # in the test
listen()                                # in the run, before it begins
"""

from pathlib import Path

import msgspec

from libra import clock
from libra.planner.plan import Plan
from libra_supervisor.app.run import Run
from libra_supervisor.events import ReconfigurationWanted
from libra_supervisor.records.reconfiguration import Line, ReconfigurationRecord

FOLDER = "wanted"


def want(run_dir: Path, plan: Plan, *, decision_id: int) -> None:
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    event = ReconfigurationWanted(decision_id, plan, f"test {decision_id}")
    path = folder / f"{decision_id}.json"
    path.with_suffix(".part").write_bytes(msgspec.json.encode(event))
    path.with_suffix(".part").rename(path)


def plan_in(run_dir: Path) -> Plan:
    return msgspec.json.decode((run_dir / "plan.json").read_bytes(), type=Plan)


def changes_in(run_dir: Path) -> list[ReconfigurationRecord]:
    path = run_dir / "reconfigurations.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = [msgspec.json.decode(line, type=Line) for line in lines]
    return [it for it in found if isinstance(it, ReconfigurationRecord)]


def listen() -> None:
    start_rim = Run._start_rim

    def start_rim_and_listen(self, tasks, *rest):
        start_rim(self, tasks, *rest)
        tasks.start_soon(_take, self)

    Run._start_rim = start_rim_and_listen


async def _take(run: Run) -> None:
    folder = run._launch.directory.root / FOLDER
    while True:
        for path in sorted(folder.glob("*.json")):
            content = path.read_bytes()
            path.unlink()
            await run.inbox.post(msgspec.json.decode(content, type=ReconfigurationWanted))
        await clock.sleep(0.05)

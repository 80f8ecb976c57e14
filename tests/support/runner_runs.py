"""A rollout runner over a fleet of the test's making, and what it posted."""

from contextlib import asynccontextmanager

import anyio

from fake_fleet import FakeFleet, FakeScorer, answers
from libra import clock
from libra.data.dataset import PromptDataset, PromptRules
from libra.data.formats import open_source
from libra.data.task import PromptFields
from libra.data.tokenizer import PromptTokenizer
from libra.workflows.single_turn import single_turn
from libra_supervisor.events import SampleFinished, SampleGaveUp, SampleStarted
from libra_supervisor.rollouts.client import GenerationSettings
from libra_supervisor.rollouts.runner import RolloutRunner, RunnerParts
from tokenizer_dirs import write_tokenizer

SETTINGS = GenerationSettings(
    run_seed=7,
    max_model_len=64,
    max_new_tokens=8,
    vocab_size=200,
    idle_timeout_s=300,
    retry_delay_s=0.5,
)


class Run:
    """A runner and what it posted."""

    def __init__(self, tmp_path, fleet, *, scorer=None, workflow=single_turn, settings=SETTINGS):
        tokenizer = PromptTokenizer(write_tokenizer(tmp_path / "tokenizer"))
        rows = tmp_path / "x.jsonl"
        rows.write_text('{"prompt": "a", "answer": "b", "level": 3}\n' * 100)
        self.fleet = fleet
        self.scorer = scorer or FakeScorer()
        self.events = []
        self.posted_at = []
        dataset = PromptDataset(
            open_source(rows),
            tokenizer,
            fields=PromptFields(),
            rules=PromptRules(max_prompt_tokens=60),
        )
        self.runner = RolloutRunner(
            RunnerParts(
                tasks=dataset,
                workflow=workflow,
                tokenizer=tokenizer,
                router=fleet,
                scorer=self.scorer,
                post=self.post,
                settings=settings,
            )
        )

    async def post(self, event):
        self.events.append(event)
        self.posted_at.append(clock.now())

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]

    def durations(self):
        """Seconds from each sample's start to its end."""
        at = dict(zip(map(key_of, self.events), self.posted_at, strict=True))
        ends = [k for k in at if k[0] is SampleFinished]
        return [at[k] - at[SampleStarted, *k[1:]] for k in ends]

    def failures(self):
        return [e.failure for e in self.of(SampleGaveUp)]

    async def until_idle(self):
        # Long steps: each one costs a few milliseconds of real time.
        while self.runner.num_groups:
            await clock.sleep(50)


def key_of(event):
    if isinstance(event, SampleFinished):
        return (SampleFinished, event.trajectory.group_id, event.trajectory.sample_index)
    return (type(event), event.group_id, event.sample_index)


@asynccontextmanager
async def running(tmp_path, behave=None, **parts):
    run = Run(tmp_path, FakeFleet(behave), **parts)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.runner.run)
        await clock.sleep(0)
        await clock.sleep(0)
        yield run
        tasks.cancel_scope.cancel()


def first_try(behave, *, then=answers):
    """Misbehave on the first request of each sample."""

    async def act(request, progressed):
        wanted = behave if request.request_id.endswith(".0") else then
        return await wanted(request, progressed)

    return act

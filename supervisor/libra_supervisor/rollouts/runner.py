"""Admitted groups -> scored trajectories, as events.

Every sample of a group that is not cancelled ends in exactly one SampleFinished or SampleGaveUp.
What goes wrong with one sample is a value; what goes wrong in here ends the run.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Never, Protocol, TypeAlias

import anyio
import anyio.lowlevel
import msgspec
from anyio import to_thread

from libra import clock
from libra.data.task import Task
from libra.data.tokenizer import PromptTokenizer
from libra.errors import DrainingError, InvariantError, LibraError, RefusedError
from libra.ids import GroupId
from libra.rewards.case import RewardCase
from libra.rewards.coercion import RewardFailed, coerced
from libra.rollouts.group import AdmittedGroup, identity_error
from libra.rollouts.trajectory import FailureKind, SampleFailed, Trajectory, alignment_error
from libra.rollouts.transcript import AlignmentBrokenError, PrefixBrokenError
from libra.user_code import error_in_words
from libra.workflows.client import Workflow
from libra_supervisor.events import (
    SampleFinished,
    SampleGaveUp,
    SampleProgressed,
    SampleStarted,
)
from libra_supervisor.rollouts.client import (
    EngineSilentError,
    GenerationSettings,
    Router,
    SampleClient,
)
from libra_supervisor.rollouts.user_tasks import users_code

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

RENEW_PERIOD_S = 5.0
"""How often signs of life of running samples are passed on."""

SampleEvent: TypeAlias = SampleStarted | SampleProgressed | SampleFinished | SampleGaveUp
Post: TypeAlias = Callable[[SampleEvent], Awaitable[None]]


class Tasks(Protocol):
    """Where tasks come from; `libra.data.dataset.PromptDataset` is the real one."""

    def task(self, row: int) -> Task:
        """Reads and tokenises: called in a thread."""


class Scorer(Protocol):
    async def score(self, case: RewardCase) -> float | RewardFailed: ...


class RunnerParts(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner works with."""

    tasks: Tasks
    workflow: Workflow
    tokenizer: PromptTokenizer
    router: Router
    scorer: Scorer
    post: Post
    settings: GenerationSettings


class RolloutRunner:
    """Runs groups while `run` is alive. Implements `libra_supervisor.ports.Rollouts`."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._task_group: TaskGroup | None = None
        self._scopes: dict[GroupId, anyio.CancelScope] = {}
        self._again: dict[GroupId, Callable[[SampleClient], None]] = {}
        self._tries: dict[tuple[GroupId, int], tuple[SampleClient, anyio.CancelScope]] = {}
        """Of samples whose end has not been posted."""

        self._clients: set[SampleClient] = set()
        self.num_retries = 0
        """Engine requests that were asked for again."""

        self.timeouts_by_tokens: Counter[int] = Counter()
        """Requests given up for silence, by the answer tokens they had, rounded down to a power of
        two: when these are all long, the idle limit shapes what is learned."""

    @property
    def num_groups(self) -> int:
        return len(self._scopes)

    @property
    def num_running(self) -> int:
        """Samples whose workflow runs."""
        return len(self._clients)

    async def run(self) -> None:
        """Own every sample's task; ends by cancellation or by a bug."""
        async with anyio.create_task_group() as tasks:
            self._task_group = tasks
            try:
                await self._renew()
            finally:
                self._task_group = None

    def start(self, group: AdmittedGroup, samples: Sequence[int] | None = None) -> None:
        """Make these samples of the group; None: all of it."""
        if self._task_group is None:
            raise InvariantError(f"{group.group_id} was started while no runner runs")
        if group.group_id in self._scopes:
            raise InvariantError(f"{group.group_id} was started twice")
        scope = self._scopes[group.group_id] = anyio.CancelScope()
        wanted = range(group.n_samples) if samples is None else tuple(samples)
        self._task_group.start_soon(self._run_group, group, wanted, scope, name=group.group_id)

    def cancel(self, group_id: GroupId) -> None:
        """Stop the group's samples: from now on nothing more is posted about them.

        A group of the same id may be started at once, while the old one still winds down.
        """
        scope = self._scopes.pop(group_id, None)
        self._again.pop(group_id, None)
        if scope is not None:
            scope.cancel()

    def ask_again(self, group_id: GroupId, sample_indices: Sequence[int]) -> None:
        """Begin these samples of a running group anew, but for those that have just ended.

        Engines that did not answer a sample get it again only when no other can serve.
        """
        begin = self._again.get(group_id)
        for index in sample_indices:
            cut_off = self._tries.pop((group_id, index), None)
            if begin is not None and cut_off is not None:
                client, scope = cut_off
                begin(self._client(client.group, index, before=client))
                scope.cancel()

    def cancel_all(self, reason: str) -> None:  # noqa: ARG002 - the loop has logged it
        for group_id in list(self._scopes):
            self.cancel(group_id)

    async def _renew(self) -> Never:
        passed_on: dict[SampleClient, float] = {}
        while True:
            await clock.sleep(RENEW_PERIOD_S)
            alive = {c: c.progressed_at for c in self._clients if c.progressed_at is not None}
            for client, at in alive.items():
                if passed_on.get(client, -1.0) < at:
                    await self._parts.post(
                        SampleProgressed(client.group.group_id, client.sample_index)
                    )
            passed_on = alive

    async def _run_group(
        self, group: AdmittedGroup, wanted: Sequence[int], scope: anyio.CancelScope
    ) -> None:
        try:
            with scope:
                task = await to_thread.run_sync(self._parts.tasks.task, group.prompt.row)
                async with anyio.create_task_group() as samples:

                    def begin_again(client: SampleClient) -> None:
                        samples.start_soon(self._run_sample, task, client)

                    self._again[group.group_id] = begin_again
                    for index in wanted:
                        samples.start_soon(self._begin_sample, group, task, index)
        finally:
            if self._scopes.get(group.group_id) is scope:
                del self._scopes[group.group_id]
                self._again.pop(group.group_id, None)

    async def _begin_sample(self, group: AdmittedGroup, task: Task, index: int) -> None:
        await self._parts.post(SampleStarted(group.group_id, index))
        await self._run_sample(task, self._client(group, index))

    def _client(
        self, group: AdmittedGroup, index: int, *, before: SampleClient | None = None
    ) -> SampleClient:
        """Of one try of a sample; `before` is that of the try before, which is cut off."""
        return SampleClient(
            group,
            index,
            router=self._parts.router,
            tokenizer=self._parts.tokenizer,
            settings=self._parts.settings,
            before=before,
        )

    async def _run_sample(self, task: Task, client: SampleClient) -> None:
        """One try of a sample; of those that were not cut off one ends it."""
        group, index = client.group, client.sample_index
        key = (group.group_id, index)
        scope = anyio.CancelScope()
        self._tries[key] = client, scope
        outcome: Trajectory | SampleFailed | None = None
        try:
            with scope:
                outcome = await self._outcome(task, client)
        finally:
            if self._tries.get(key) == (client, scope):
                del self._tries[key]
        if outcome is None or scope.cancel_called:
            return
        if isinstance(outcome, SampleFailed):
            await self._parts.post(SampleGaveUp(group.group_id, index, outcome))
        else:
            await self._parts.post(SampleFinished(outcome))

    async def _outcome(self, task: Task, client: SampleClient) -> Trajectory | SampleFailed:
        self._clients.add(client)
        try:
            outcome = await self._rolled_out(task, client)
        finally:
            self._clients.discard(client)
            self.num_retries += client.num_retries
        if isinstance(outcome, Trajectory):
            outcome = await self._scored(task, outcome)
        return outcome

    async def _rolled_out(self, task: Task, client: SampleClient) -> Trajectory | SampleFailed:
        try:
            with users_code():
                trajectory = await self._parts.workflow(task, client)
        except InvariantError:
            raise
        except LibraError as error:
            if isinstance(error, EngineSilentError):
                self.timeouts_by_tokens[_rounded_down(client.num_tokens)] += 1
            return SampleFailed(_kind_of(error), str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - workflows are written by users
            return SampleFailed("workflow", error_in_words(error))
        except anyio.get_cancelled_exc_class():
            # Ours goes on here; that of a task which the workflow itself had cancelled does not.
            await anyio.lowlevel.checkpoint_if_cancelled()
            return SampleFailed("workflow", "it waited for something that was cancelled")
        return _checked(trajectory, client, self._parts.settings)

    async def _scored(self, task: Task, trajectory: Trajectory) -> Trajectory | SampleFailed:
        """The trajectory with its reward; a workflow may have given one itself."""
        reward: float | RewardFailed
        if trajectory.reward is not None:
            reward = coerced(trajectory.reward)
        else:
            reward = await self._parts.scorer.score(_case(task, trajectory))
        if isinstance(reward, RewardFailed):
            return SampleFailed("reward", reward.reason)
        return msgspec.structs.replace(trajectory, reward=reward)


def _checked(
    trajectory: object, client: SampleClient, settings: GenerationSettings
) -> Trajectory | SampleFailed:
    """The border to user code: what comes back is a trajectory of this sample, or a failure."""
    if not isinstance(trajectory, Trajectory):
        return SampleFailed("workflow", f"returned a {type(trajectory).__name__}, no Trajectory")
    try:
        plain = _plain(trajectory)
    except (TypeError, ValueError, OverflowError) as error:  # also what msgspec raises
        return SampleFailed("workflow", f"returned a Trajectory that cannot be kept: {error}")
    if (other := identity_error(plain, client.group, client.sample_index)) is not None:
        return SampleFailed("workflow", f"returned {other}")
    wrong = _bounds_error(plain, settings)
    if wrong is not None:
        return SampleFailed("workflow", wrong)
    wrong = alignment_error(plain)
    return plain if wrong is None else SampleFailed("alignment", wrong)


def _plain(trajectory: Trajectory) -> Trajectory:
    """The trajectory with the types that its class declares, a list for a tuple aside.

    Records and checkpoints hold it later, where a number of numpy's would be nobody's fault. What
    the workflow gave as reward is a reward's business. Raises what the encoder and decoder raise.
    """
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(trajectory, reward=None))
    decoded = msgspec.msgpack.decode(encoded, type=Trajectory)
    return msgspec.structs.replace(decoded, reward=trajectory.reward)


def _bounds_error(trajectory: Trajectory, settings: GenerationSettings) -> str | None:
    """What the trainer could not take: it would fail the whole gang."""
    token_ids = trajectory.token_ids
    if len(token_ids) > settings.max_model_len:
        return f"returned {len(token_ids)} tokens, max_model_len is {settings.max_model_len}"
    if token_ids and min(token_ids) < 0:
        return f"returned token id {min(token_ids)}"
    if settings.vocab_size is not None and token_ids and max(token_ids) >= settings.vocab_size:
        return f"returned token id {max(token_ids)}, the model has {settings.vocab_size}"
    return None


def _kind_of(error: LibraError) -> FailureKind:
    match error:
        case PrefixBrokenError():
            return "prefix"
        case AlignmentBrokenError():
            return "alignment"
        case EngineSilentError():
            return "timeout"
        case DrainingError():
            return "cancelled"
        case RefusedError():
            return "engine"
        case _ if error.retryable:
            return "engine"
        case _:
            return "workflow"


def _case(task: Task, trajectory: Trajectory) -> RewardCase:
    return RewardCase(
        prompt_id=task.prompt_id,
        prompt_text=task.prompt_text,
        response_text=trajectory.response_text,
        answer=task.answer,
        extras=task.extras,
        finish_reason=trajectory.finish_reason,
        num_response_tokens=trajectory.num_response_tokens,
        num_turns=trajectory.num_turns,
    )


def _rounded_down(num_tokens: int) -> int:
    return 1 << (num_tokens.bit_length() - 1) if num_tokens else 0

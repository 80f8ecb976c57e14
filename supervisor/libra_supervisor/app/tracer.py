"""The control plane's phase trace: what the loop's events and records say about time."""

from libra import clock
from libra.tracing.span import Phase, SpanWriter
from libra_supervisor.events import ChildReady, Event, ReloadAnswered
from libra_supervisor.loop.commands import Command, WriteReload, WriteStep


class Tracer:
    """Follows events and commands, and records the spans that they end."""

    def __init__(self, spans: SpanWriter) -> None:
        self._spans = spans

    def on_event(self, event: Event) -> None:
        now = clock.monotonic()
        match event:
            case ChildReady():
                began_at = now - event.start_s
                self._spans.record(
                    Phase.START_CHILD, began_at, now, track=event.child_id, child=event.child_id
                )
            case ReloadAnswered(ack=ack) if ack is not None:
                self._spans.record(
                    Phase.RELOAD_INSTANCE,
                    now - ack.total_s,
                    now,
                    track=ack.instance_id,
                    version=ack.policy_version,
                    method=ack.method,
                    model_load_s=ack.model_load_s,
                )
            case _:
                return

    def on_command(self, command: Command) -> None:
        now = clock.monotonic()
        match command:
            case WriteStep(record):
                # From the back: export and the wait before or after it, training, and before
                # them the wait for rollouts.
                waited_at = now - record.step_s + record.rollout_wait_s
                trained_at = now - record.publish_wait_s - record.export_s
                began_at = now - record.step_s
                step = record.step
                self._spans.record(Phase.ROLLOUT_WAIT, began_at, waited_at, step=step)
                self._spans.record(Phase.TRAIN_STEP, waited_at, trained_at, step=step)
            case WriteReload(record):
                self._spans.record(
                    Phase.WEIGHT_SYNC, now - record.total_s, now, version=record.policy_version
                )
            case _:
                return

    def close(self) -> None:
        self._spans.close()

"""The control plane's own metrics page, read from the run's state when it is asked for."""

from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from libra import clock
from libra.scheduling.scheduler import Scheduler
from libra.wire.api import StatusSnapshot
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.app.replan_desk import Outcomes
from libra_supervisor.loop.control import Control
from libra_supervisor.loop.stall import StallMeter
from libra_supervisor.records.trackers import Trackers


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Whose figures are shown, beside the control state's."""

    stalls: StallMeter
    forecaster: Forecaster
    trackers: Trackers
    scheduler: Scheduler
    outcomes: Outcomes


class RunCollector(Collector):
    """Gauges and counters `libra_*`; units are in the names."""

    def __init__(
        self,
        control: Control,
        status: Callable[[], StatusSnapshot],
        sources: Sources,
    ) -> None:
        self._control = control
        self._status = status
        self._stalls = sources.stalls
        self._forecaster = sources.forecaster
        self._trackers = sources.trackers
        self._scheduler = sources.scheduler
        self._outcomes = sources.outcomes

    def collect(self) -> Iterator[Metric]:
        status, control = self._status(), self._control
        yield GaugeMetricFamily("libra_step", "Newest trained step.", status.step)
        version = -1 if status.policy_version is None else status.policy_version
        yield GaugeMetricFamily(
            "libra_policy_version", "Version the engines serve; -1 before the first.", version
        )
        serving = GaugeMetricFamily(
            "libra_instances", "Rollout instances by state.", labels=["state"]
        )
        states = [member.state.value for member in control.pool.members]
        for state in sorted(set(states)):
            serving.add_metric([state], states.count(state))
        yield serving
        yield GaugeMetricFamily(
            "libra_trajectories_running", "Generated or scored right now.", status.num_running
        )
        yield GaugeMetricFamily(
            "libra_trajectories_buffered", "Of complete groups that wait.", status.num_buffered
        )
        by_node = GaugeMetricFamily(
            "libra_node_trajectories", "In progress, by the node that makes them.", labels=["node"]
        )
        for node in status.nodes:
            by_node.add_metric([str(node.node)], node.num_samples)
        yield by_node
        yield from self._of_engines(status)
        yield self._of_affinity()
        yield from self._of_last_step()
        yield from self._of_forecast()
        missed = CounterMetricFamily(
            "libra_tracker_missed_steps",
            "Steps that a tracker dropped or failed to keep.",
            labels=["tracker"],
        )
        for tracker in self._trackers.all:
            missed.add_metric([tracker.name], tracker.num_dropped + tracker.num_failed)
        yield missed
        dropped = CounterMetricFamily(
            "libra_trajectories_dropped", "Dropped since the run began.", labels=["reason"]
        )
        for reason, count in control.desk.dropped_by_reason.items():
            dropped.add_metric([reason], count)
        yield dropped
        yield from self._of_event_loop()
        yield from self._of_reloads()
        yield from self._of_plans()

    def _of_plans(self) -> Iterator[Metric]:
        plans, outcomes = self._control.plans, self._outcomes
        slots = GaugeMetricFamily("libra_plan_slots", "Of the plan in force.", labels=["side"])
        slots.add_metric(["train"], plans.plan.train.world_size)
        slots.add_metric(["rollout"], plans.plan.num_rollout_gpus)
        slots.add_metric(["hybrid"], plans.plan.num_hybrid_gpus)
        yield slots
        decisions = CounterMetricFamily(
            "libra_plan_decisions", "Looks at the plan.", labels=["verdict"]
        )
        for verdict in ("keep", "switch", "ordered", "order_refused"):
            decisions.add_metric([verdict], outcomes.num_decisions[verdict])
        yield decisions
        changes = CounterMetricFamily(
            "libra_reconfigurations", "Changes of the plan that ended.", labels=["outcome"]
        )
        for outcome, number in plans.num_by_outcome.items():
            changes.add_metric([outcome], number)
        yield changes
        seconds = CounterMetricFamily(
            "libra_reconfiguration_seconds", "What they took, by phase.", labels=["phase"]
        )
        for phase, spent_s in plans.seconds_by_phase.items():
            seconds.add_metric([phase], spent_s)
        yield seconds
        yield from _of_newest_look(outcomes)

    def _of_reloads(self) -> Iterator[Metric]:
        counts = self._control.publication.counts
        batches = CounterMetricFamily(
            "libra_reload_batches", "Batches of weight reloads that ended.", labels=["outcome"]
        )
        for outcome, number in counts.num_batches.items():
            batches.add_metric([outcome], number)
        yield batches
        yield CounterMetricFamily(
            "libra_reload_acks_refused",
            "Duplicate, late or foreign acknowledgements.",
            counts.num_refused_acks,
        )
        yield CounterMetricFamily(
            "libra_reload_quarantines",
            "Instances taken out of routing because a reload failed.",
            counts.num_quarantined,
        )
        last = counts.last
        if last is None:
            return
        part_of = GaugeMetricFamily(
            "libra_reload_instance_seconds",
            "Longest of any instance in the newest batch of the whole fleet, by part.",
            labels=["part"],
        )
        for part in ("lock_wait_s", "process_stop_s", "model_load_s", "total_s"):
            longest = max((getattr(ack, part) for ack in last.acks), default=0.0)
            part_of.add_metric([part.removesuffix("_s")], longest)
        yield part_of
        yield GaugeMetricFamily(
            "libra_reload_probe_difference",
            "Largest |trainer - engine| logprob of the probe in it.",
            last.probe_difference,
        )

    def _of_event_loop(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(
            "libra_event_loop_stall_seconds",
            "How much later than due the control plane's event loop woke a task.",
            buckets=self._stalls.buckets(),
            sum_value=self._stalls.sum_s,
        )
        yield GaugeMetricFamily(
            "libra_event_loop_longest_stall_seconds",
            "The longest of the last minute.",
            self._stalls.longest_s(now=clock.now()),
        )

    def _of_engines(self, status: StatusSnapshot) -> Iterator[Metric]:
        """As last scraped; what an engine does not tell is absent, never 0."""
        engines = [child for child in status.children if child.role == "rollout"]
        for name, text, values in (
            (
                "libra_engine_requests_in_flight",
                "Ours, by instance.",
                {e.child: e.num_in_flight for e in engines},
            ),
            (
                "libra_engine_requests_queued",
                "Waiting inside the engine, of whomever.",
                {e.child: e.num_queued for e in engines},
            ),
            (
                "libra_engine_kv_use_ratio",
                "KV-cache occupancy, 0 to 1.",
                {e.child: e.kv_use_fraction for e in engines},
            ),
            (
                "libra_engine_signals_age_seconds",
                "Since the engine's metrics were last read.",
                {e.child: e.signals_age_s for e in engines},
            ),
        ):
            family = GaugeMetricFamily(name, text, labels=["instance"])
            for instance, value in values.items():
                if value is not None:
                    family.add_metric([instance], value)
            yield family

    def _of_affinity(self) -> Metric:
        counts = self._scheduler.affinity_counts
        lookups = CounterMetricFamily(
            "libra_prefix_affinity_lookups", "Requests with a prompt id.", labels=["outcome"]
        )
        for outcome in ("new", "kept", "migrated", "broken"):
            lookups.add_metric([outcome], getattr(counts, f"num_{outcome}"))
        return lookups

    def _of_last_step(self) -> Iterator[Metric]:
        last = self._control.book.last
        if last is None:
            return
        for name, text, value in (
            ("libra_reward_mean", "Mean reward of the newest step.", last.reward_mean),
            ("libra_kl_mismatch", "k3 of trainer against engine.", last.kl_mismatch),
            ("libra_staleness_versions_mean", "Mean staleness.", last.staleness_mean),
            ("libra_response_tokens_per_second", "Trained on.", last.tokens_per_s),
            ("libra_step_seconds", "Wall time of the newest step.", last.step_s),
            ("libra_train_seconds", "Its training part.", last.train_s),
            ("libra_rollout_wait_seconds", "Its wait for rollouts.", last.rollout_wait_s),
            (
                "libra_reload_seconds",
                "The weight reload that was settled in it, beside training.",
                last.reload_s,
            ),
            (
                "libra_publish_wait_seconds",
                "How long the trainer stood still for a weight reload.",
                last.publish_wait_s,
            ),
        ):
            yield GaugeMetricFamily(name, text, value)

    def _of_forecast(self) -> Iterator[Metric]:
        """What the cost model expected of the newest step; absent where it expects nothing."""
        last, book = self._forecaster.latest, self._forecaster.book
        errors = GaugeMetricFamily(
            "libra_prediction_error_fraction",
            "Measured / predicted - 1 of the newest step.",
            labels=["side"],
        )
        if last is not None:
            for side, error in (
                ("train", last.train_error_fraction),
                ("rollout", last.rollout_error_fraction),
                ("memory", last.memory_error_fraction),
            ):
                if error is not None:
                    errors.add_metric([side], error)
        yield errors
        factors = GaugeMetricFamily(
            "libra_calibration_ratio",
            "Measured over predicted, averaged: what corrects the next plan.",
            labels=["operation"],
        )
        for operation, factor in sorted(book.factors.items()) if book else ():
            factors.add_metric([operation], factor.ratio)
        yield factors


def registry_of(collector: Collector) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def _of_newest_look(outcomes: Outcomes) -> Iterator[Metric]:
    if (decided := outcomes.last) is not None and "earned_s" in decided.numbers:
        yield GaugeMetricFamily(
            "libra_plan_earned_seconds",
            "What the best other plan would earn within the horizon, at the newest look.",
            decided.numbers["earned_s"],
        )
        yield GaugeMetricFamily(
            "libra_plan_price_seconds",
            "What going over to it would cost, with the uncertainty.",
            decided.numbers["price_s"],
        )
    if (last := outcomes.last_ended) is not None:
        yield GaugeMetricFamily(
            "libra_reconfiguration_stalled_seconds",
            "How long training stood still for the newest change.",
            last.stalled_s,
        )

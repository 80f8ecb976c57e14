"""Several schedulers over one fleet in virtual time: how even is what they do together?"""

import heapq
import random
from collections import Counter
from typing import Literal

import msgspec

from fleets import fleet_of, request
from libra.scheduling.request import Routed
from libra.scheduling.scheduler import Scheduler
from libra.scheduling.shared_view import FORMAT, RankLoad, SharedView
from libra_supervisor.shared_load.exchange import MIN_INTERVAL_S

Sharing = Literal["one scheduler", "shared load", "own view"]
SLOW_START_OVER_S = 40.0


class Herd(msgspec.Struct, frozen=True, kw_only=True):
    """Bursts of `burst` requests per rank and second, at a random moment of the second."""

    num_ranks: int = 8
    num_instances: int = 64
    burst: int = 64
    mean_duration_s: float = 4.0
    duration_s: float = 30.0
    seed: int = 1


class Imbalance(msgspec.Struct, frozen=True, kw_only=True):
    """max / mean of requests in flight per instance, over samples taken 20 times a second."""

    mean: float
    p99: float


def simulate(herd: Herd, sharing: Sharing) -> Imbalance:
    """Run `herd` on one clock; requests and their durations are the same for every `sharing`."""
    run = _Run(herd, sharing)
    while run.events and run.events[0][0] < SLOW_START_OVER_S + herd.duration_s:
        now, _, kind, what = heapq.heappop(run.events)
        run.handle(kind, what, now)
    samples = sorted(run.samples)
    return Imbalance(mean=sum(samples) / len(samples), p99=samples[int(0.99 * (len(samples) - 1))])


class _Run:
    def __init__(self, herd: Herd, sharing: Sharing) -> None:
        self.herd, self.sharing = herd, sharing
        num_schedulers = 1 if sharing == "one scheduler" else herd.num_ranks
        self.schedulers = [fleet_of(herd.num_instances) for _ in range(num_schedulers)]
        self.views = [
            SharedView(own_rank=str(k), own_writer=str(k), ttl_s=30.0)
            for k in range(num_schedulers)
        ]
        self.disk: dict[str, RankLoad] = {}
        self.in_flight: Counter[str] = Counter()
        self.samples: list[float] = []
        self.events: list[tuple[float, int, str, object]] = []
        self.num_events = 0
        rng = random.Random(herd.seed)
        begin = SLOW_START_OVER_S - 3 * herd.mean_duration_s
        for rank in range(herd.num_ranks):
            for second in range(int(begin), int(SLOW_START_OVER_S + herd.duration_s)):
                durations = [rng.expovariate(1 / herd.mean_duration_s) for _ in range(herd.burst)]
                self.at(second + rng.random(), "burst", (rank, durations))
        for rank in range(num_schedulers):
            phase = rng.random() * MIN_INTERVAL_S
            if sharing == "shared load":
                self.at(begin + phase, "exchange", rank)
        for k in range(int(20 * herd.duration_s)):
            self.at(SLOW_START_OVER_S + k / 20, "sample", None)

    def at(self, when: float, kind: str, what: object) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, kind, what))

    def handle(self, kind: str, what: object, now: float) -> None:
        match kind, what:
            case "burst", (int(rank), list(durations)):
                scheduler = self.schedulers[rank % len(self.schedulers)]
                for duration in durations:
                    self.place(scheduler, duration, now)
            case "end", (Scheduler() as scheduler, reservation):
                scheduler.complete(reservation, 10, now)
                self.in_flight[reservation.instance_id] -= 1
            case "exchange", int(rank):
                self.exchange(rank, now)
                self.at(now + MIN_INTERVAL_S, "exchange", rank)
            case _:
                counts = [self.in_flight[f"i{k}"] for k in range(self.herd.num_instances)]
                self.samples.append(max(counts) * len(counts) / sum(counts))

    def place(self, scheduler: Scheduler, duration: float, now: float) -> None:
        decision = scheduler.route(request(), now)
        assert isinstance(decision, Routed)
        self.in_flight[decision.instance] += 1
        self.at(now + duration, "end", (scheduler, decision.reservation))

    def exchange(self, rank: int, now: float) -> None:
        scheduler, view = self.schedulers[rank], self.views[rank]
        name = str(rank)
        last = self.disk.get(name)
        self.disk[name] = RankLoad(
            format=FORMAT,
            rank=name,
            writer=name,
            sequence=1 if last is None else last.sequence + 1,
            written_at_ns=0,
            load=scheduler.own_load(),
        )
        view.on_read(self.disk, now=now, wall_ns=0)
        scheduler.on_remote_load(view.remote_load(now), now)

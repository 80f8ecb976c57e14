"""Any history of prompts: affinity keeps to candidates, to its bounds and to its margin."""

from collections import OrderedDict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fleets import FIRST, fleet_of, request, spec
from libra.ids import InstanceId
from libra.scheduling.affinity import MARGIN_REQUESTS
from libra.scheduling.slow_start import DURATION_S

NAMES = [f"i{k}" for k in range(3)]
MAX_ENTRIES = 4
PROMPTS = st.sampled_from("abcdefg")


class AffinityMachine(RuleBasedStateMachine):
    """The model maps a prompt to (instance, prefix cache), oldest use first."""

    @initialize()
    def begin(self):
        self.scheduler = fleet_of(3, prefix_affinity=True, prefix_affinity_max_entries=MAX_ENTRIES)
        self.now = 0.0
        self.pass_slow_start()
        self.cache_of = dict.fromkeys(NAMES, 0)
        self.num_caches = 0
        self.incarnation_of = dict.fromkeys(NAMES, FIRST)
        self.load_of = dict.fromkeys(NAMES, 0)
        self.is_ready = dict.fromkeys(NAMES, True)
        self.home_of: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self.held = []
        self.counts = {"new": 0, "kept": 0, "migrated": 0, "broken": 0}

    def pass_slow_start(self):
        self.now += DURATION_S
        self.scheduler.on_tick(self.now)

    @rule(prompt=PROMPTS, repeats=st.integers(1, 12))
    def route(self, prompt, repeats):
        for _ in range(repeats):
            self.route_once(prompt)

    def route_once(self, prompt):
        candidates = [name for name in NAMES if self.is_ready[name]]
        ask = request(prompt=prompt)
        told = self.scheduler.explain(ask, self.now)
        decision = self.scheduler.route(ask, self.now)
        if not candidates:
            assert told.choice is None
            self.scheduler.abandon(decision.ticket, self.now)
            return
        reservation = decision.reservation
        chosen = reservation.instance_id
        assert told.choice == chosen
        least = min(self.load_of[name] for name in candidates)
        assert chosen in candidates
        assert self.load_of[chosen] <= least + MARGIN_REQUESTS
        self.note(prompt, chosen, least)
        self.load_of[chosen] += 1
        self.held.append(reservation)

    def note(self, prompt, chosen, least):
        home = self.home_of.pop(prompt, None)
        if home is None:
            kind = "new"
        elif self.cache_of[home[0]] != home[1]:
            kind = "broken"
        elif self.is_ready[home[0]] and self.load_of[home[0]] <= least + MARGIN_REQUESTS:
            kind = "kept"
            assert chosen == home[0]
        else:
            kind = "migrated"
        if kind != "kept":
            assert self.load_of[chosen] == least
        self.counts[kind] += 1
        self.home_of[prompt] = (chosen, self.cache_of[chosen])
        if len(self.home_of) > MAX_ENTRIES:
            self.home_of.popitem(last=False)

    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        if self.held:
            reservation = self.held.pop(pick % len(self.held))
            if reservation.incarnation == self.incarnation_of[reservation.instance_id]:
                self.load_of[reservation.instance_id] -= 1
            self.scheduler.complete(reservation, 5, self.now)

    @rule(name=st.sampled_from(NAMES), is_ready=st.booleans())
    def set_ready(self, name, is_ready):
        self.is_ready[name] = is_ready
        self.scheduler.set_ready(InstanceId(name), is_ready, self.now)

    @rule(name=st.sampled_from(NAMES), is_planned=st.booleans())
    def restart(self, name, is_planned):
        self.num_caches += 1
        self.scheduler.restart_instance(
            spec(name, incarnation=f"n{self.num_caches}"), self.now, is_planned=is_planned
        )
        self.is_ready[name], self.load_of[name] = True, 0
        self.incarnation_of[name] = f"n{self.num_caches}"
        if not is_planned:
            self.cache_of[name] = self.num_caches
        self.pass_slow_start()

    @invariant()
    def counts_equal_the_model(self):
        if not hasattr(self, "counts"):
            return
        told = self.scheduler.affinity_counts
        assert self.counts == {
            "new": told.num_new,
            "kept": told.num_kept,
            "migrated": told.num_migrated,
            "broken": told.num_broken,
        }


AffinityMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestAffinity = AffinityMachine.TestCase

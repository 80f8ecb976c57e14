from random import Random

from hypothesis import given
from hypothesis import strategies as st

from libra_supervisor.process.restart import GiveUp, RestartAfter, RestartBudget, RestartPolicy

policies = st.builds(
    RestartPolicy,
    backoff_initial_s=st.floats(0.01, 10),
    backoff_max_s=st.floats(10, 100),
    backoff_factor=st.floats(1, 10),
    jitter_fraction=st.floats(0, 0.9),
    max_in_window=st.integers(1, 6),
    window_s=st.floats(1, 1000),
    max_without_progress=st.integers(1, 6),
    stable_s=st.sampled_from([0.0, 50.0, 500.0]),
)
histories = st.lists(st.tuples(st.floats(0, 400), st.booleans()), max_size=30)


@given(policy=policies, history=histories, seed=st.integers(0, 99))
def test_restarts_stay_within_both_budgets_and_delays_within_the_jittered_cap(
    policy, history, seed
):
    budget, rng, now = RestartBudget(policy), Random(seed), 0.0
    restarted_at, in_a_row, failed_at = [], 0, None
    for gap_s, has_progress in history:
        now += gap_s
        if has_progress:
            budget.on_progress(now=now)
            if failed_at is None or now - failed_at >= policy.stable_s:
                in_a_row = 0
        recent = [at for at in restarted_at if at > now - policy.window_s]
        decision = budget.on_failure("it fell", now=now, rng=rng)
        failed_at = now
        is_spent = len(recent) >= policy.max_in_window or in_a_row >= policy.max_without_progress
        if is_spent:
            assert isinstance(decision, GiveUp)
            assert decision.first_cause == "it fell"
            return
        assert isinstance(decision, RestartAfter)
        assert decision.num_recent_restarts == len(recent) + 1
        spread = policy.jitter_fraction
        ceiling = policy.backoff_max_s * (1 + spread)
        assert policy.backoff_initial_s * (1 - spread) <= decision.delay_s * (1 + 1e-9)
        assert decision.delay_s <= ceiling * (1 + 1e-9)
        restarted_at.append(now)
        in_a_row += 1


@given(policy=policies, seed=st.integers(0, 99), gap_s=st.floats(0, 10_000))
def test_a_loop_without_progress_ends_however_slow_it_is(policy, seed, gap_s):
    budget, rng = RestartBudget(policy), Random(seed)
    decisions = [
        budget.on_failure(f"cause {k}", now=k * gap_s, rng=rng)
        for k in range(policy.max_without_progress + 1)
    ]
    given_up = [d for d in decisions if isinstance(d, GiveUp)]
    assert given_up
    assert given_up[0].first_cause == "cause 0"

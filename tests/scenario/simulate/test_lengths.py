import pytest

from libra.errors import ConfigError, DataError
from libra.simulate.lengths import GeneratedLengths, prior_lengths, read_trace
from planner_cases import grp_config


def generated(**changes):
    values = {
        "seed": 1,
        "mean_tokens": 1000.0,
        "sigma": 0.8,
        "longest": 100_000,
        "prompt_tokens": 100,
    }
    return GeneratedLengths(**{**values, **changes})


def responses(source, *, step=0, num_groups=400):
    groups = (source.group(index, step=step, n_samples=8) for index in range(num_groups))
    return [group.response_tokens for group in groups]


def mean(groups):
    return sum(map(sum, groups)) / sum(map(len, groups))


def test_generated_lengths_have_the_mean_and_no_more_than_the_limit():
    assert mean(responses(generated())) == pytest.approx(1000, rel=0.1)
    assert max(map(max, responses(generated(longest=1500)))) == 1500


def test_the_same_seed_gives_the_same_lengths_and_another_seed_others():
    assert responses(generated()) == responses(generated())
    assert responses(generated()) != responses(generated(seed=2))


def test_siblings_are_more_alike_than_strangers_when_prompts_share_the_variance():
    def spread(groups):
        return sum(max(group) / min(group) for group in groups) / len(groups)

    alike, apart = generated(prompt_share=0.9), generated(prompt_share=0.0)
    assert spread(responses(alike)) < spread(responses(apart)) / 2


def test_drift_makes_later_responses_longer():
    drifting = generated(growth_per_step=0.1)
    assert mean(responses(drifting, step=10)) == pytest.approx(
        mean(responses(drifting)) * 1.1**10, rel=0.01
    )


def test_the_prior_of_the_planner_is_what_is_drawn():
    config = grp_config(planner={"prior_response_mean_tokens": 700, "prior_response_sigma": 0.4})
    source = prior_lengths(config, seed=1, growth_per_step=0.0)
    assert mean(responses(source)) == pytest.approx(700, rel=0.1)
    assert source.demand(config).num_response_tokens / 512 == pytest.approx(700, rel=0.01)


def test_responses_cannot_shrink_to_nothing():
    with pytest.raises(ConfigError, match="must be above -1"):
        prior_lengths(grp_config(), seed=1, growth_per_step=-1.0)


def test_a_trace_is_used_in_order_and_over_again(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"prompt_tokens": 5, "response_tokens": [10, 20]}\n\n'
        '{"prompt_tokens": 6, "response_tokens": [30]}\n'
    )
    trace = read_trace(path, grp_config())
    groups = [trace.group(index, step=0, n_samples=3) for index in range(3)]
    assert [group.response_tokens for group in groups] == [(10, 20, 10), (30, 30, 30), (10, 20, 10)]
    assert set(trace.demand(grp_config()).response_tokens) == {10, 20, 30}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "trace.jsonl:2: "),
        ('{"prompt_tokens": 5}', "trace.jsonl:2: .*response_tokens"),
        ('{"prompt_tokens": 0, "response_tokens": [3]}', "trace.jsonl:2: lengths must be"),
        ('{"prompt_tokens": 18432, "response_tokens": [3]}', "trace.jsonl:2: .* no room .* 18432"),
        ('{"prompt_tokens": 1, "response_tokens": []}', "trace.jsonl:2: lengths must be"),
        ('{"prompt_tokens": 1, "response_tokens": [1], "x": 1}', "trace.jsonl:2: .*x"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, said):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt_tokens": 5, "response_tokens": [10]}\n' + line)
    with pytest.raises(DataError, match=said):
        read_trace(path, grp_config())


def test_a_trace_that_is_empty_or_missing_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="holds no lengths"):
        read_trace(tmp_path / "empty.jsonl", grp_config())
    with pytest.raises(DataError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl", grp_config())


def test_recorded_responses_end_where_the_engines_would_end_them(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"prompt_tokens": 5, "response_tokens": [99999999999, 7]}\n'
        '{"prompt_tokens": 18000, "response_tokens": [2000]}\n'
    )
    trace = read_trace(path, grp_config())
    first, second = (trace.group(index, step=0, n_samples=2) for index in range(2))
    assert first.response_tokens == (16384, 7)
    assert second.response_tokens == (18432 - 18000,) * 2

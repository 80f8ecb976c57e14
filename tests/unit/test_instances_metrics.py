import pytest

from libra_supervisor.instances.metrics import server_metrics

NEW = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 9.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.795e+09
vllm:prompt_tokens_total{engine="0",model_name="m"} 546.0
vllm:generation_tokens_total{engine="0",model_name="m"} 4180.0
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="1536",num_gpu_blocks="48"} 1
process_start_time_seconds 1.79597238422e+09
"""


def read(page):
    return server_metrics(page, incarnation="i#1", sampled_at=12.0)


def test_a_page_of_vllm_0_32_is_read():
    metrics = read(NEW)
    load = metrics.load
    assert (load.incarnation, load.sampled_at) == ("i#1", 12.0)
    assert (load.num_running, load.num_waiting, load.num_waiting_for_capacity) == (3.0, 5.0, 4.0)
    assert (load.kv_use_fraction, load.num_preemptions) == (0.25, 9.0)
    assert load.kv_capacity_tokens == 1536
    assert load.process_started_at_s == 1.79597238422e09
    assert metrics.num_tokens == 4726.0


@pytest.mark.case("R-B18")
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"vllm:gpu_cache_usage_perc": 0.4}, 0.4),
        ({"vllm:kv_cache_usage_perc": 0.3}, 0.3),
        ({"vllm:gpu_cache_usage_perc": 0.4, "vllm:kv_cache_usage_perc": 0.3}, 0.3),
        ({}, None),
    ],
)
def test_the_kv_gauge_has_two_names_and_the_new_one_wins(names, expected):
    page = "".join(f'{name}{{engine="0"}} {value}\n' for name, value in names.items())
    assert read(page).load.kv_use_fraction == expected


@pytest.mark.case("R-B19")
def test_the_engines_of_one_server_are_summed_and_the_fullest_counts():
    second = NEW.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    load = read(NEW + second.replace("process_start", "#")).load
    assert (load.num_running, load.num_waiting, load.kv_use_fraction) == (6.0, 10.0, 0.75)
    assert load.kv_capacity_tokens == 3072


@pytest.mark.case("R-B19")
def test_each_engine_of_a_data_parallel_server_is_told_by_itself():
    page = "".join(
        f'vllm:num_requests_running{{engine="{engine}"}} {running}\n'
        f'vllm:num_requests_waiting{{engine="{engine}"}} {waiting}\n'
        for engine, running, waiting in (
            (10, 1, 2),
            (0, 3, 0),
            (1, 4, 500),
            (2, "NaN", 7),
            (3, -1, "+Inf"),
        )
    )
    use = 'vllm:gpu_cache_usage_perc{engine="1"} 0.5\nvllm:kv_cache_usage_perc{engine="0"} 0.1\n'
    load = read(page + use).load
    assert load.num_waiting == 509.0
    told = [(e.engine, e.num_running, e.num_waiting, e.kv_use_fraction) for e in load.engines]
    assert told == [
        ("0", 3.0, 0.0, 0.1),
        ("1", 4.0, 500.0, 0.5),
        ("2", None, 7.0, None),
        ("10", 1.0, 2.0, None),
    ]
    assert read(NEW).load.engines == ()


def test_an_older_server_tells_its_capacity_in_blocks():
    page = NEW.replace('kv_cache_size_tokens="1536",', "")
    assert read(page).load.kv_capacity_tokens == 48 * 32
    unset = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read(unset).load.kv_capacity_tokens is None


def test_an_empty_page_knows_nothing():
    metrics = read("")
    assert metrics.num_tokens is None
    assert metrics.load.num_running is None
    assert metrics.load.kv_capacity_tokens is None


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-Inf", "-5", "1e308", "many"])
def test_one_engines_impossible_number_is_dropped_and_the_others_count(odd):
    page = f'vllm:num_requests_running{{engine="0"}} {odd}\n'
    assert read(page).load.num_running is None
    page += 'vllm:num_requests_running{engine="1"} 2\nvllm:num_requests_running{engine="2"} 3\n'
    assert read(page).load.num_running == 5.0


def test_impossible_numbers_that_would_cancel_each_other_are_no_number():
    for values in (("+Inf", "-Inf"), ("1e308", "1e308")):
        lines = [f'vllm:num_preemptions_total{{engine="{v}{k}"}} {v}' for k, v in enumerate(values)]
        assert read("\n".join(lines)).load.num_preemptions is None


def test_a_cache_more_than_full_is_unknown_and_the_other_engine_is_read():
    page = 'vllm:kv_cache_usage_perc{engine="0"} 57\nvllm:kv_cache_usage_perc{engine="1"} 0.2\n'
    assert read(page).load.kv_use_fraction == 0.2
    old = 'vllm:gpu_cache_usage_perc{engine="0"} 0.4\n'
    assert read(page.splitlines()[0] + "\n" + old).load.kv_use_fraction == 0.4


def test_a_capacity_of_thousands_of_digits_is_unknown():
    page = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 5000}"}} 1.0\n'
    assert read(page).load.kv_capacity_tokens is None


def test_the_capacity_of_a_server_is_unknown_while_one_of_its_engines_does_not_tell():
    told = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="10"} 1\n'
    unset = 'vllm:cache_config_info{engine="1",block_size="16",num_gpu_blocks="None"} 1\n'
    assert read(told).load.kv_capacity_tokens == 160
    assert read(told + unset).load.kv_capacity_tokens is None

from libra.ids import Incarnation, InstanceId
from libra_supervisor.instances.metrics import server_metrics
from libra_supervisor.instances.serving_meter import ServingCounters, ServingMeter

A, B = InstanceId("vllm-0"), InstanceId("vllm-1")
FIRST, SECOND = Incarnation("a"), Incarnation("b")


def counters(value):
    return ServingCounters(
        latency_s=value / 100,
        num_latencies=value,
        num_engine_steps=value / 4,
        num_generated_tokens=value,
        num_computed_prompt_tokens=value * 2,
    )


def latencies(meter):
    return {use.tp: use.num_latencies for use in meter.take()}


def test_an_interval_holds_what_was_done_since_the_one_before():
    meter = ServingMeter({A: 1})
    meter.on_page(A, FIRST, counters(100))
    meter.on_page(A, FIRST, counters(130))
    (use,) = meter.take()
    assert (use.num_latencies, use.num_engine_steps, use.num_computed_prompt_tokens) == (
        30,
        7.5,
        60,
    )
    assert meter.take() == ()
    meter.on_page(A, FIRST, counters(150))
    assert latencies(meter) == {1: 20}


def test_a_new_process_starts_its_counters_anew():
    meter = ServingMeter({A: 1})
    meter.on_page(A, FIRST, counters(100))
    meter.take()
    meter.on_page(A, SECOND, counters(10))
    meter.on_page(A, SECOND, counters(25))
    assert latencies(meter) == {1: 15}


def test_instances_of_one_degree_are_added_up_and_pages_without_counters_change_nothing():
    meter = ServingMeter({A: 2, B: 2})
    for instance_id in (A, B):
        meter.on_page(instance_id, FIRST, counters(0))
        meter.on_page(instance_id, FIRST, counters(40))
        meter.on_page(instance_id, FIRST, None)
    assert latencies(meter) == {2: 80}


PAGE = """\
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01"} 5
vllm:inter_token_latency_seconds_sum{engine="0"} 1.5
vllm:inter_token_latency_seconds_count{engine="0"} 300
vllm:iteration_tokens_total_bucket{engine="0",le="8"} 50
vllm:iteration_tokens_total_count{engine="0"} 75
vllm:iteration_tokens_total_sum{engine="0"} 4000
vllm:generation_tokens_total{engine="0"} 320
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 900
"""


def test_a_vllm_page_holds_what_the_meter_reads():
    serving = server_metrics(PAGE, incarnation=FIRST, sampled_at=1.0).serving
    assert serving == ServingCounters(
        latency_s=1.5,
        num_latencies=300,
        num_engine_steps=75,
        num_generated_tokens=320,
        num_computed_prompt_tokens=900,
    )
    older = PAGE.replace("vllm:request_prefill_kv_computed_tokens_sum", "vllm:other")
    assert server_metrics(older, incarnation=FIRST, sampled_at=1.0).serving is None

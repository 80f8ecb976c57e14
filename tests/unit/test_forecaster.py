import msgspec
import pytest
from structlog.testing import capture_logs

from control_parts import METRICS, trajectory
from libra.config.run import RunConfig
from libra.ids import Incarnation, InstanceId, PolicyVersion, PromptId, ReplicaId
from libra.planner.plan import HybridPlacement
from libra.planner.search import plan
from libra.rollouts.group import AdmittedGroup, CompleteGroup, PromptRef
from libra_supervisor.app.forecaster import Forecaster
from libra_supervisor.instances.serving_meter import ServingCounters, ServingMeter
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.step_book import StepBook
from libra_supervisor.records.calibration import CalibrationStore, empty_book
from planner_cases import H200_141G, MEASURED_1_8B, grp_config

CONFIG = grp_config(
    num_gpus=8,
    arch=MEASURED_1_8B,
    hardware=H200_141G,
    batch_size=64,
    max_new_tokens=2048,
    planner={"initial_allocation_strategy": "configured"},
)
A = InstanceId("vllm-0")


def counters(num_tokens: float) -> ServingCounters:
    """Four sequences at 20 ms a step."""
    return ServingCounters(
        latency_s=num_tokens / 50,
        num_latencies=num_tokens,
        num_engine_steps=num_tokens / 4,
        num_generated_tokens=num_tokens,
        num_computed_prompt_tokens=0.0,
    )


def on_cuda(config: RunConfig) -> RunConfig:
    control = msgspec.structs.replace(config.control, device="cuda")
    return msgspec.structs.replace(config, control=control)


def forecaster(store, config=CONFIG, *, meter=None):
    return Forecaster(
        config,
        plan(config).plan,
        book=empty_book(config),
        store=store,
        meter=meter or ServingMeter({A: 1}),
    )


def step(number: int, *, train_s: float = 2.0):
    admitted = AdmittedGroup(PromptRef(PromptId("p0"), 0, 0), 0, 2)
    made = [trajectory(admitted, i, PolicyVersion(number - 1), float(i)) for i in range(2)]
    book = StepBook()
    book.rollouts.on_opened(admitted.group_id, 2)
    book.on_collect(Moment(10.0, 1))
    for one in made:
        book.rollouts.on_started((one.group_id, one.sample_index), now=10.0)
    for one in made:
        book.rollouts.on_finished(one, now=12.0)
    groups = (CompleteGroup(admitted, tuple(made)),)
    book.on_batch_taken(number, groups, PolicyVersion(number - 1), Moment(12.0, 2))
    metrics = msgspec.structs.replace(METRICS, train_s=train_s, peak_memory_bytes=10**11)
    book.on_trained(metrics)
    book.on_exported(0.5)
    book.on_reload_begun(Moment(14.5, 4))
    book.on_reloaded(Moment(15.0, 5))
    (command,) = book.close(attempt=1, num_dropped={}, at=Moment(15.0, 5))
    return command


def test_a_step_s_record_has_predictions_and_errors_and_the_next_step_knows_better(tmp_path):
    judge = forecaster(CalibrationStore(tmp_path))
    first = judge(step(1))()
    assert first.rollout_s == 2.0
    assert first.train_error_fraction == pytest.approx(
        (first.train_s + first.recompute_s) / first.train_predicted_s - 1
    )
    assert first.train_error_fraction > 1
    assert first.rollout_error_fraction == pytest.approx(2.0 / first.rollout_predicted_s - 1)
    second = judge(step(2))()
    # A recomputation that the model knows nothing of stays an error.
    assert abs(second.train_error_fraction) < 0.1
    assert judge.latest is second
    # What was learned outlives the run.
    again = forecaster(CalibrationStore(tmp_path))
    again.book = CalibrationStore(tmp_path).load(again.book)
    assert again.book.factors["grpo_update"].num_observations == 2


def test_memory_is_predicted_where_a_device_measures_it(tmp_path):
    on_cpu = forecaster(None)(step(1))()
    assert (on_cpu.memory_predicted_bytes, on_cpu.memory_error_fraction) == (None, None)
    record = forecaster(None, on_cuda(CONFIG))(step(1))()
    assert record.memory_error_fraction == pytest.approx(10**11 / record.memory_predicted_bytes - 1)


def test_what_the_engines_count_in_a_step_corrects_decoding(tmp_path):
    meter = ServingMeter({A: 1})
    judge = forecaster(CalibrationStore(tmp_path), meter=meter)
    meter.on_page(A, Incarnation("a"), counters(0))
    meter.on_page(A, Incarnation("a"), counters(4000))
    complete = judge(step(1))
    # What comes after the step was taken belongs to the next one.
    meter.on_page(A, Incarnation("a"), counters(9000))
    complete()
    assert judge.book.factors["rollout_decode"].num_observations == 1
    judge(step(2))()
    judge(step(3))()
    assert judge.book.factors["rollout_decode"].num_observations == 2


def test_a_run_that_describes_no_device_predicts_nothing():
    bare = msgspec.structs.replace(CONFIG, hardware=None)
    record = forecaster(None, bare)(step(1))()
    assert record.train_predicted_s is None
    assert record.rollout_error_fraction is None


def test_a_store_that_cannot_be_written_is_said_once_and_the_run_goes_on_learning(tmp_path):
    (tmp_path / "file").write_text("")
    judge = forecaster(CalibrationStore(tmp_path / "file"))
    with capture_logs() as said:
        judge(step(1))()
        judge(step(2))()
    assert [entry["event"] for entry in said] == ["calibration_not_stored"]
    assert judge.book.factors["grpo_update"].num_observations == 2


def test_hybrid_replicas_are_expected_to_take_their_share_of_training():
    judge = forecaster(None)
    alone = judge(step(1))().train_predicted_s
    placed = plan(CONFIG).plan
    hybrid = HybridPlacement(replica_id=ReplicaId("hybrid-0"), slots=placed.instances[0].slots)
    judge.follow(msgspec.structs.replace(placed, hybrids=(hybrid,) * 4))
    judge.book = empty_book(CONFIG)
    assert judge(step(2))().train_predicted_s < alone

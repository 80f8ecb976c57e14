import msgspec
import pytest

from libra.config.model import ModelConfig
from libra.config.planning import PlannerConfig
from libra.config.rollout import RolloutConfig
from libra.config.run import RunConfig
from libra.config.training import TrainingConfig
from libra.config.weights import WeightsConfig
from libra_supervisor.instances.vllm import InstancePlacement, ServingPaths, server_spec
from libra_supervisor.process.spec import environment_of

PATHS = ServingPaths(
    python="/venv/bin/python",
    weights_directory="/run/weights",
    token_file="/run/token",
    working_directory="/run",
    log_path="/run/logs/vllm-0.log",
)
CPU = InstancePlacement(
    instance_id="vllm-0",
    incarnation="vllm-0-abc",
    device_kind="cpu",
    devices=("0",),
    host="127.0.0.1",
    port=8100,
)
CUDA = msgspec.structs.replace(CPU, device_kind="cuda", devices=("GPU-a", "GPU-b"))


def spec_of(
    placement=CPU,
    *,
    environment=None,
    served_directory=None,
    sync_mode="restart",
    train_dtype="bfloat16",
    lent="stop",
    **r,
):
    config = RunConfig(
        model=ModelConfig(model_path="/models/base", tokenizer_path="/models/tokenizer"),
        rollout=RolloutConfig(**r),
        training=TrainingConfig(train_dtype=train_dtype),
        weights=WeightsConfig(rollout_weight_sync_mode=sync_mode),
        global_resource_planner=PlannerConfig(runtime_lent_servers=lent),
    )
    return server_spec(
        config,
        placement,
        run_id="run-1",
        paths=PATHS,
        environment=environment or {"PATH": "/bin"},
        served_directory=served_directory,
    )


def test_servers_that_are_kept_asleep_can_give_memory_back_where_vllm_can():
    assert "--enable-sleep-mode" in spec_of(CUDA, lent="sleep").argv
    assert "--enable-sleep-mode" not in spec_of(CUDA).argv
    # On CPU vLLM refuses the flag, and obeys the calls all the same.
    assert "--enable-sleep-mode" not in spec_of(CPU, lent="sleep").argv


def value_of(spec, flag):
    assert spec.argv.count(flag) == 1, flag
    return spec.argv[spec.argv.index(flag) + 1]


def test_a_cpu_server_is_started_by_the_launcher_with_what_the_run_says():
    spec = spec_of(max_model_len=512, rollout_max_num_seqs=16)
    assert spec.argv[:5] == (
        "/venv/bin/python",
        "-m",
        "libra.serving.launch",
        "--",
        "/models/base",
    )
    assert value_of(spec, "--tokenizer") == "/models/tokenizer"
    assert value_of(spec, "--max-model-len") == "512"
    assert value_of(spec, "--max-num-seqs") == "16"
    assert value_of(spec, "--dtype") == "bfloat16"
    assert value_of(spec, "--kv-cache-memory-bytes") == str(64 * 2**20)
    assert value_of(spec, "--logprobs-mode") == "processed_logprobs"
    assert value_of(spec, "--generation-config") == "vllm"
    assert value_of(spec, "--distributed-executor-backend") == "uni"
    assert "--enforce-eager" in spec.argv
    assert "--no-enable-chunked-prefill" in spec.argv
    assert value_of(spec, "--max-num-batched-tokens") == "4096"
    assert "--gpu-memory-utilization" not in spec.argv
    assert (spec.child_id, spec.cwd, spec.log_path) == ("vllm-0", "/run", "/run/logs/vllm-0.log")


def test_the_server_is_told_who_it_is():
    env = spec_of().env
    assert env["LIBRA_INSTANCE_ID"] == "vllm-0"
    assert env["LIBRA_INCARNATION"] == "vllm-0-abc"
    assert env["LIBRA_RUN_ID"] == "run-1"
    assert env["LIBRA_WEIGHTS_DIR"] == "/run/weights"
    assert env["LIBRA_TOKEN_FILE"] == "/run/token"
    assert env["PATH"] == "/bin"


def test_workers_are_bound_to_their_cores():
    placement = msgspec.structs.replace(CPU, devices=("0-3", "4-7"))
    spec = spec_of(placement)
    assert value_of(spec, "--tensor-parallel-size") == "2"
    assert spec.env["VLLM_CPU_OMP_THREADS_BIND"] == "0-3|4-7"
    assert "--distributed-executor-backend" not in spec.argv


def test_a_gpu_server_sees_only_its_devices():
    spec = spec_of(CUDA)
    assert spec.env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert value_of(spec, "--tensor-parallel-size") == "2"
    assert value_of(spec, "--gpu-memory-utilization") == "0.9"
    assert "--enforce-eager" not in spec.argv
    assert "--kv-cache-memory-bytes" not in spec.argv
    assert spec.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in spec.env


def test_what_the_configuration_pins_wins():
    spec = spec_of(
        CUDA,
        rollout_kv_cache_bytes=10**9,
        rollout_enforce_eager=True,
        rollout_dtype="float16",
        rollout_extra_args=["--block-size", "32"],
    )
    assert value_of(spec, "--kv-cache-memory-bytes") == str(10**9)
    assert value_of(spec, "--dtype") == "float16"
    assert "--enforce-eager" in spec.argv
    assert spec.argv[-2:] == ("--block-size", "32")
    assert "--enforce-eager" not in spec_of(rollout_enforce_eager=False).argv


def test_auto_dtype_follows_the_trainer():
    assert value_of(spec_of(train_dtype="float32"), "--dtype") == "float32"


def test_a_published_version_can_be_served_from_the_start():
    assert spec_of(served_directory="/run/weights/v000007").argv[4] == "/run/weights/v000007"


@pytest.mark.case("R-B36")
def test_the_network_is_left_alone_and_our_arguments_are_not_overridden():
    spec = spec_of(
        environment={
            "HTTP_PROXY": "http://proxy",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_API_KEY": "key",
            "TORCHDYNAMO_DISABLE": "0",
        }
    )
    env = environment_of(spec)
    assert "HTTP_PROXY" not in env
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert "VLLM_API_KEY" not in env
    assert env["HF_HUB_OFFLINE"] == env["VLLM_NO_USAGE_STATS"] == "1"
    assert env["TORCHDYNAMO_DISABLE"] == "0"


def test_servers_have_different_seeds_and_the_same_server_always_the_same():
    other = msgspec.structs.replace(CPU, instance_id="vllm-1")
    assert value_of(spec_of(), "--seed") == value_of(spec_of(), "--seed")
    assert value_of(spec_of(), "--seed") != value_of(spec_of(other), "--seed")


def test_the_url_brackets_an_ipv6_host():
    assert CPU.base_url == "http://127.0.0.1:8100"
    assert msgspec.structs.replace(CPU, host="::1").base_url == "http://[::1]:8100"


def test_only_a_run_that_transfers_weights_asks_vllm_for_an_engine_that_does():
    assert value_of(spec_of(sync_mode="nccl"), "--weight-transfer-config") == '{"backend": "libra"}'
    assert "--weight-transfer-config" not in spec_of().argv


def test_a_step_of_a_cpu_engine_takes_any_whole_prompt():
    assert value_of(spec_of(max_model_len=9000), "--max-num-batched-tokens") == "9000"

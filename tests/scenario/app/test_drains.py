"""What an operator takes out of routing, over the life of several supervisors."""

import json

import pytest


def child(run, name):
    return next(it for it in run.status()["children"] if it["child"] == name)


@pytest.mark.parametrize("ends", ["stop", "crash"])
def test_a_drained_engine_is_drained_yet_when_the_run_is_resumed(fake_run, ends):
    run = fake_run(total_steps=1_000_000)
    run.start()
    run.until_step(1)
    assert run.call("drain", "--node", "0").returncode == 0
    assert run.call("undrain", "vllm-1").returncode == 0
    run.until(lambda: child(run, "vllm-0")["state"] == "draining")
    run.until(lambda: child(run, "vllm-1")["state"] == "serving")
    state = run.run_dir / "state.json"
    run.until(lambda: json.loads(state.read_text())["facts"] == {"drained": ["vllm-0"]})
    if ends == "crash":
        run.kill()
    else:
        assert run.call("stop").returncode == 0
        assert run.wait() == 0
    step = max(run.steps())
    run.start("--resume")
    run.until_step(step + 3)
    drained = child(run, "vllm-0")
    assert drained["state"] in ("draining", "reloading")
    assert drained["num_in_flight"] == 0
    assert run.call("undrain", "vllm-0").returncode == 0
    run.until(lambda: child(run, "vllm-0")["num_in_flight"] > 0)
    run.until(lambda: json.loads(state.read_text())["facts"] == {})

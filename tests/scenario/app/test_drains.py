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


def test_when_every_engine_is_drained_status_says_what_helps_after_a_resume_too(fake_run):
    run = fake_run(total_steps=1_000_000)
    run.start()
    run.until_step(1)
    said = "every server is drained by order: nothing is asked of any until undrain"
    assert run.call("drain", "vllm-0").returncode == 0
    run.until(lambda: child(run, "vllm-0")["state"] == "draining")
    assert said not in run.status()["waiting_for"]
    assert run.call("drain", "vllm-1").returncode == 0
    run.until(lambda: said in run.status()["waiting_for"])
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    step = max(run.steps())
    run.start("--resume")
    run.until(lambda: said in run.status().get("waiting_for", ""))
    assert run.call("undrain", "vllm-1").returncode == 0
    run.until_step(step + 3)
    assert said not in run.status()["waiting_for"]


def test_what_was_drained_and_is_no_longer_there_is_forgotten(fake_run):
    run = fake_run(total_steps=1_000_000)
    run.start()
    run.until_step(1)
    assert run.call("drain", "vllm-1").returncode == 0
    run.until(lambda: child(run, "vllm-1")["state"] == "draining")
    state = run.run_dir / "state.json"
    run.until(lambda: json.loads(state.read_text())["facts"] == {"drained": ["vllm-1"]})
    assert run.call("stop").returncode == 0
    assert run.wait() == 0
    step = max(run.steps())
    # As after a change of the plan that took a server away.
    found = json.loads(state.read_text())
    found["facts"]["drained"] = ["vllm-7", "vllm-1"]
    state.write_text(json.dumps(found))
    run.start("--resume")
    run.until_step(step + 2)
    run.until(lambda: json.loads(state.read_text())["facts"] == {"drained": ["vllm-1"]})

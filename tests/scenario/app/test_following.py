"""A follower's program where it must not begin."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest

from fake_runs import write_config
from libra.config.load import load_config
from libra.errors import SiteError
from libra_supervisor.app.following import (
    Following,
    config_digest,
    follow,
    node_directory,
    speaking_for,
)
from libra_supervisor.app.recall import record_run_id
from libra_supervisor.nodes.site import Site
from libra_supervisor.run_directory import LOCK_NAME, Holder, RunDirectory, held

HERE = os.uname().nodename
ADVICE = "correct nodes, or say with --node-rank which node this machine is"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def signals():
    kept = {it: signal.getsignal(it) for it in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def following(tmp_path, **options):
    config = load_config(write_config(tmp_path, total_steps=1, **options), purpose="plan").config
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    node_directory(directory, 1).create()
    return Following(
        site=Site(hosts=("127.0.0.1", "127.0.0.2"), port=9, rank=1),
        config=config,
        environ=dict(os.environ),
        directory=directory,
        token="a token of these nodes",
        devices=(),
    )


async def test_a_machine_that_leads_is_no_follower_too_and_its_children_are_left_alone(tmp_path):
    told = following(tmp_path)
    record_run_id(told.directory, "run-1")
    env = {"LIBRA_RUN_ID": "run-1", "LIBRA_CHILD_ID": "vllm-0"}
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        with held(told.directory):
            outcome = await follow(told)
        assert outcome.exit_code == 5
        assert "leads this run on this very machine" in outcome.reason
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (None, "another libra-supervisor speaks for node 1 of this run already, and this is "),
        (
            "gpu07",
            f"on gpu07 speaks for node 1 of this run already, and this is {HERE}: {ADVICE}",
        ),
        (HERE, "speaks for node 1 of this run already: end that process first"),
    ],
)
def test_of_two_that_claim_a_rank_the_second_is_told_who_the_first_is(tmp_path, host, said):
    own = RunDirectory(tmp_path)
    with speaking_for(1, own):
        lock = tmp_path / LOCK_NAME
        lock.write_bytes(b"" if host is None else msgspec.json.encode(Holder(4711, host)))
        with pytest.raises(SiteError) as found, speaking_for(1, own):
            pass
    assert said in str(found.value)
    assert "--run-dir" not in str(found.value)
    with pytest.raises(KeyError), speaking_for(1, own):
        raise KeyError


def test_nodes_agree_on_all_that_is_not_their_own_affair(tmp_path):
    (tmp_path / "a").mkdir()
    same = config_digest(following(tmp_path / "a").config)
    paths = {"node_token_file": "/x", "node_tls_cert": "/c", "node_tls_key": "/k"}
    (tmp_path / "a" / "run.yaml").unlink()
    first = load_config(write_config(tmp_path / "a", total_steps=1), purpose="plan").config
    own = load_config(write_config(tmp_path / "a", total_steps=1, **paths), purpose="plan").config
    other = load_config(write_config(tmp_path / "a", total_steps=2), purpose="plan").config
    assert config_digest(first) == config_digest(own) == same
    assert config_digest(other) != same

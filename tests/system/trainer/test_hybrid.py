"""Real gangs: a core, and hybrid replicas that come, contribute and go.

The measure is always a core alone on the same global batch.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from hybrid_run import (
    HybridRun,
    Membership,
    are_equal,
    chosen,
    difference_of_norms,
    relative_difference,
)
from libra.hybrid.fault import Fault
from tiny_models import make_tiny_model
from trainer_gang import Program
from trainer_ranks import make_samples, run_config

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

VOCAB_SIZE = 250
TOLERANCE = 5e-5
ROUGH = 2e-2
"""Of bfloat16, whose last bit is 4e-3."""

STEP_OF_MEMBERS = 5
"""In it a core of one rank has nothing to learn from: all its samples have no advantage."""

KINDS_USED = ("qwen2", "qwen2_tied", "qwen3_moe")
METRICS = {"loss", "grad_norm", "entropy", "kl_mismatch", "ratio_mean", "num_tokens"}
NUM_STEPS = 8
FIRST, LAST = 3, 6
"""The steps that replicas take part in."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {kind: make_tiny_model(directory / kind, kind) for kind in KINDS_USED}


def batch_of(step, *, num_mini_batches=1, num_samples=12):
    samples = make_samples(step, num_samples, VOCAB_SIZE)
    if step == STEP_OF_MEMBERS:
        samples[::2] = [structs.replace(it, advantage=0.0) for it in samples[::2]]
    return [samples[index::num_mini_batches] for index in range(num_mini_batches)]


def options(**changes):
    return {"micro_batch_size": 4, "weight_decay": 0.01, "max_model_len": 64} | changes


def alone(config, directory, num_ranks, *, num_steps=NUM_STEPS, **batch):
    with HybridRun(config, directory, num_ranks, replica_size=1) as run:
        run.until_ready()
        trained = [run.train(step, batch_of(step, **batch)) for step in range(1, num_steps + 1)]
        return trained, run.weights(None, num_steps, "weights")


MANY_STREAMS = Program(
    arguments=(str(Path(__file__).parent / "many_streams.py"),), has_torchrun=False
)


class Case(NamedTuple):
    """A layout of the core, and who joins it."""

    core_size: int = 1
    replica_size: int = 1
    num_replicas: int = 1
    kind: str = "qwen2"
    num_mini_batches: int = 1
    over_tcp: bool = False
    program: Program = Program()
    options: Mapping[str, Any] = MappingProxyType({})


def long(name, case):
    return pytest.param(case, id=name, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), id="one rank"),
        pytest.param(Case(2, 2, options={"train_tp_size": 2}), id="tp 2"),
        long(
            "dp 2, two replicas, distributed optimizer",
            Case(
                2,
                num_replicas=2,
                num_mini_batches=2,
                options={"megatron_use_distributed_optimizer": True},
            ),
        ),
        long("dp 2, tcp", Case(2, over_tcp=True)),
        long("tcp, four streams", Case(over_tcp=True, program=MANY_STREAMS)),
        long("bfloat16", Case(options={"train_dtype": "bfloat16"})),
        long(
            "pp 2, tied embeddings, distributed optimizer",
            Case(
                4,
                2,
                kind="qwen2_tied",
                options={"train_pp_size": 2, "megatron_use_distributed_optimizer": True},
            ),
        ),
        long(
            "tp 2, pp 2, two replicas, sequence parallel",
            Case(
                4,
                4,
                num_replicas=2,
                options={
                    "train_tp_size": 2,
                    "train_pp_size": 2,
                    "megatron_sequence_parallel": True,
                },
            ),
        ),
        long("cp 2", Case(2, 2, options={"train_cp_size": 2})),
        long("ep 2", Case(4, 2, kind="qwen3_moe", options={"train_ep_size": 2})),
    ],
)
def test_a_core_with_hybrids_learns_what_it_learns_alone(models, tmp_path, case):
    config = run_config(models[case.kind], **options(**case.options))
    parts = case.num_mini_batches

    def batch(step):
        return batch_of(step, num_mini_batches=parts)

    run = HybridRun(config, tmp_path / "with", case.core_size, replica_size=case.replica_size)
    with run:
        names = [run.start(f"hybrid-{index}", case.program) for index in range(case.num_replicas)]
        run.until_ready()
        run.open_lanes()
        trained = [run.train(1, batch(1))]
        snapshot = run.snapshot(1)
        trained.append(run.train(2, batch(2), who=Membership(joiners=names)))
        for name in names:
            assert run.join(name, snapshot, over_tcp=case.over_tcp) == 1
            run.follow(name, 2, num=parts)
        who = Membership(members=names)
        trained += [run.train(step, batch(step), who=who) for step in range(FIRST, LAST + 1)]
        core = run.weights(None, LAST, "core_weights")
        for name in names:
            assert are_equal(run.weights(run.replicas[name], LAST, f"{name}_weights"), core)
            run.leave(name)
        trained += [run.train(step, batch(step)) for step in range(LAST + 1, NUM_STEPS + 1)]
        weights = run.weights(None, NUM_STEPS, "last_weights")
    by_itself, wanted = alone(config, tmp_path / "alone", case.core_size, num_mini_batches=parts)
    print(f"largest relative difference: {relative_difference(weights, wanted):.2g}")
    is_exact = config.training.train_dtype == "float32"
    if is_exact:
        assert relative_difference(weights, wanted) < TOLERANCE
    else:
        # Where a gradient is near zero, its rounding decides which way AdamW goes at full speed.
        assert difference_of_norms(weights, wanted) < ROUGH
    allowed = {} if is_exact else rounding(config, tmp_path, by_itself, num_ranks=case.core_size)
    # With several mini-batches the mismatch is measured on the core's own shards.
    compare(
        trained, by_itself, names=METRICS - ({"kl_mismatch"} if parts > 1 else set()), **allowed
    )


def compare(trained, wanted, *, names, **allowed):
    for got, expected in zip(trained, wanted, strict=True):
        assert got.dropped == {}
        for name in names:
            bound = {"abs": allowed[name]} if allowed else {"rel": 1e-4, "abs": 1e-6}
            assert getattr(got.metrics, name) == pytest.approx(
                getattr(expected.metrics, name), **bound
            ), (got.step, name)


def rounding(config, directory, rounded, *, num_ranks):
    """How far two runs of a dtype may be apart, by metric: each as far from float32 as `rounded`.

    A loss is what is left of terms that cancel, and a share of it says nothing of their rounding.
    """
    training = structs.replace(config.training, train_dtype="float32")
    config = structs.replace(config, training=training)
    exact, _ = alone(config, directory / "float32", num_ranks)
    return {
        name: 2 * max(apart(name, *pair) for pair in zip(rounded, exact, strict=True))
        for name in METRICS
    }


def apart(name, one, other):
    return abs(getattr(one.metrics, name) - getattr(other.metrics, name))


BAD = {
    "nan": Fault.NOT_FINITE,
    "norm": Fault.NORM,
    "checksum": Fault.CHECKSUM,
    "fence": Fault.FENCE,
    "digest": Fault.DIGEST,
    "garbage": Fault.GONE,
    "killed": Fault.GONE,
    "stopped": Fault.LATE,
}
"""What a member does in the middle of step 2, and what the core says about it."""


def test_bad_members_are_dropped_by_all_ranks_alike_and_the_core_goes_on(models, tmp_path):
    config = run_config(models["qwen2"], **options(elastic_hybrid_contribution_timeout_s=15))
    whole = batch_of(2, num_samples=40)
    with HybridRun(config, tmp_path / "with", 2, replica_size=1) as run:
        good = run.start("good", Program(has_torchrun=False))
        bad = [run.start(how, hostile(how)) for how in BAD]
        # The good one is in the middle.
        everyone = Membership(members=[*bad[:4], good, *bad[4:]])
        run.until_ready()
        run.open_lanes()
        run.train(1, batch_of(1, num_samples=40))
        snapshot = run.snapshot(1)
        for name in everyone.members:
            run.join(name, snapshot)
        trained = [run.train(2, whole, who=everyone, survivors=[good])]
        for name in bad:
            run.kill(name)
        trained.append(
            run.train(3, batch_of(3, num_samples=40), who=Membership(members=[good], epoch=2))
        )
        weights = run.weights(None, 3, "weights")
        assert are_equal(run.weights(run.replicas[good], 3, "good_weights"), weights)
        left = chosen(whole, run.num_shards(everyone), [0, 1, 2 + everyone.members.index(good)])
    assert {name: words.partition(" (")[0] for name, words in trained[0].dropped.items()} == {
        name: BAD[name].words for name in bad
    }
    assert trained[1].dropped == {}
    by_itself, wanted = trained_on(config, tmp_path / "alone", [left, batch_of(3, num_samples=40)])
    for got, expected in zip(trained, by_itself, strict=True):
        assert got.metrics.num_tokens == expected.metrics.num_tokens
        assert got.metrics.loss == pytest.approx(expected.metrics.loss, rel=1e-5, abs=1e-7)
        assert got.metrics.grad_norm == pytest.approx(expected.metrics.grad_norm, rel=1e-5)
    assert relative_difference(weights, wanted) < TOLERANCE


def hostile(how):
    return Program(
        arguments=(str(Path(__file__).parent / "hostile_replica.py"),),
        environment={"HOSTILE": how, "HOSTILE_STEP": "2"},
        has_torchrun=False,
    )


def trained_on(config, directory, batches):
    """Steps from 2 on, and the last weights, of a core without members."""
    with HybridRun(config, directory, 2, replica_size=1) as run:
        run.until_ready()
        run.train(1, batch_of(1, num_samples=40))
        trained = [run.train(step, batch) for step, batch in enumerate(batches, start=2)]
        return trained, run.weights(None, 1 + len(batches), "weights")

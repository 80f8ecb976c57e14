"""A publication to servers on several nodes: who is asked when, and with whose receipt."""

import pytest

from control_parts import PROBE, RUN
from libra.config.weights import WeightsConfig
from libra.pools.pool import RolloutPool
from libra.wire.instance import WeightsReceipt
from libra.wire.rank import WeightsExported
from libra_supervisor.loop import commands
from libra_supervisor.loop.moment import Moment
from libra_supervisor.loop.publication import Publication, Terms
from reload_messages import reload_ack

NODE_OF = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}
NOW = Moment(1.0, 1)


def publication(strategy):
    pool = RolloutPool([(name, 1) for name in NODE_OF], now=0.0, node_of=NODE_OF)
    for name in NODE_OF:
        pool.on_started(name, f"{name}#1", now=0.0)
        pool.on_answering(name, now=0.0)
    weights = WeightsConfig(rollout_weight_reload_strategy=strategy)
    terms = Terms(
        run_id=RUN, weights=weights, min_rollout_gpus=1, probe_token_ids=PROBE, probe_tolerance=1e-3
    )
    return Publication(terms, pool)


def checked(made, *, receipt_of):
    exported = WeightsExported(1, "/w/v1", "hash", (-1.0,) * (len(PROBE) - 1), 0.1)
    (check,) = made.on_exported(exported)
    assert isinstance(check, commands.CheckExport)
    made.on_checked(receipt_of)
    return check, sent(made.reload(at=NOW))


def sent(done):
    return {it.instance_id: it.request for it in done if isinstance(it, commands.SendReload)}


def test_the_export_is_read_once_on_every_node_that_has_servers():
    check, _ = checked(publication("parallel"), receipt_of={})
    assert check.nodes == (1, 2)


def test_serial_goes_on_every_node_at_the_same_time_and_one_by_one_on_each():
    made = publication("serial")
    _, asked = checked(made, receipt_of={})
    assert sorted(asked) == ["a", "c", "e"]
    answers = [("c", ["d"]), ("a", ["b"]), ("e", []), ("b", []), ("d", [])]
    for name, then in answers:
        request = asked[name]
        ack = reload_ack(request, name, strategy="serial")
        done = made.on_ack(ack, asked=name, nonce=request.nonce, at=NOW)
        assert sorted(sent(done)) == then
        asked |= sent(done)
    assert any(isinstance(it, commands.TellRankZero) for it in done)


@pytest.mark.parametrize("strategy", ["parallel", "serial"])
def test_every_server_gets_the_receipt_of_its_own_node(strategy):
    receipts = {0: WeightsReceipt("boot-0", ()), 2: WeightsReceipt("boot-2", ())}
    made = publication(strategy)
    _, asked = checked(made, receipt_of=receipts)
    for name, request in asked.items():
        assert request.receipt == receipts.get(NODE_OF[name])


@pytest.mark.case("R-B87")
def test_a_server_without_a_receipt_has_to_have_read_the_files_itself():
    made = publication("parallel")
    _, asked = checked(made, receipt_of={0: WeightsReceipt("boot-0", ())})
    by_receipt = ("manifest", "receipt", "load", "probe")
    done = {}
    for name in ("a", "c"):
        ack = reload_ack(asked[name], name, verified=by_receipt)
        done[name] = made.on_ack(ack, asked=name, nonce=asked[name].nonce, at=NOW)
    assert commands.Unroute("a") not in done["a"]
    assert commands.Unroute("c") in done["c"]

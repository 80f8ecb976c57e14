"""A plan that an operator names. What he does not name stays as it is."""

import msgspec

from libra.errors import InfeasiblePlanError
from libra.planner.plan import Plan, TrainPlacement
from libra.planner.replan import Question
from libra.planner.replan_costs import SwitchKind
from libra.planner.replan_load import ObservedLoad
from libra.planner.replan_rule import model_error
from libra.planner.replan_seating import Room, core_seats, everywhere, seated
from libra.wire.api import PlanOrder


def ordered_plan(plan: Plan, order: PlanOrder, room: Room) -> Plan:
    """`plan` with what `order` names.

    Names of what is new are provisional. Raises InfeasiblePlanError when sizes do not fit together
    or into the room.
    """
    train = _core(plan, order, room)
    kept = plan.hybrids if train.layout == plan.train.layout else ()
    num_replicas = len(plan.hybrids) if order.hybrids is None else order.hybrids
    replica_gpus = train.tp * train.pp * train.cp * train.ep
    if order.instances is None:
        num_rollout_gpus = sum(len(it.slots) for it in plan.instances)
    else:
        num_rollout_gpus = sum(bucket.tp * bucket.count for bucket in order.instances)
    num_needed = train.world_size + num_replicas * replica_gpus + num_rollout_gpus
    num_there = len(everywhere(plan, room))
    if num_needed > num_there:
        raise InfeasiblePlanError(f"this needs {num_needed} GPUs, and the run has {num_there}")
    tps = [it.tp for it in plan.instances]
    if order.instances is not None:
        tps = [bucket.tp for bucket in order.instances for _ in range(bucket.count)]
    base = msgspec.structs.replace(plan, train=train, hybrids=kept)
    found = seated(base, tps, num_replicas=num_replicas, replica_gpus=replica_gpus, room=room)
    if found is None:
        raise InfeasiblePlanError("node boundaries leave no room for all instances and replicas")
    return found


def kind_of(old: Plan, new: Plan) -> SwitchKind:
    """Whose measured cost a change from `old` to `new` is."""
    if old.train != new.train:
        return "reshape"
    if len(new.hybrids) == len(old.hybrids):
        return "rollout"
    return "to_training" if len(new.hybrids) > len(old.hybrids) else "to_rollout"


def expectations(question: Question, wanted: Plan) -> dict[str, float]:
    """Step times that the model expects of the plan in force and of `wanted`, bias taken out.

    Empty when hardware or model are not described, or one of the two serves nothing.
    """
    if question.book is None or not (question.plan.instances and wanted.instances):
        return {}
    load = ObservedLoad(question.config, question.sorts, question.book)
    now_s, wanted_s = load.step_s(question.plan), load.step_s(wanted)
    bias = model_error(expected_s=now_s, times=question.times).bias
    return {
        "step_s": bias * now_s,
        "candidate_step_s": bias * wanted_s,
        "gain_s": bias * (now_s - wanted_s),
    }


def _core(plan: Plan, order: PlanOrder, room: Room) -> TrainPlacement:
    old = plan.train
    new = msgspec.structs.replace(
        old,
        tp=order.train_tp_size or old.tp,
        pp=order.train_pp_size or old.pp,
        cp=order.train_cp_size or old.cp,
        ep=order.train_ep_size or old.ep,
    )
    num_gpus = order.train_gpus or old.world_size
    model_parallel = new.tp * new.pp * new.cp
    if num_gpus % model_parallel:
        raise InfeasiblePlanError(
            f"train_gpus {num_gpus} is not a multiple of TP x PP x CP = {model_parallel}"
        )
    slots = core_seats(plan, new.tp, num_gpus, room)
    if slots is None:
        num_there = len(everywhere(plan, room))
        why = f"and the run has {num_there} GPUs"
        if num_gpus <= num_there:
            why = f"and node boundaries leave no room for groups of {new.tp}"
        raise InfeasiblePlanError(f"train_gpus {num_gpus}, {why}")
    nodes = tuple(node for node, _ in slots)
    one_node = len(set(nodes)) == 1
    return msgspec.structs.replace(
        new,
        dp=num_gpus // model_parallel,
        slots=tuple(slot for _, slot in slots),
        node=nodes[0],
        nodes=() if one_node else nodes,
    )

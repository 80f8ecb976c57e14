"""Budgets, minima and candidates of the planner; switches of the elastic runtime."""

from collections.abc import Iterator

from libra.config.arithmetic import model_parallel_size, nearest_divisors, planner_decides
from libra.config.problems import Problem, one_of
from libra.config.run import RunConfig

PLANNER = "global_resource_planner"
MASTER_SWITCH = f"{PLANNER}.runtime_dynamic_reconfiguration_enabled"
BEHIND_THE_MASTER_SWITCH = (
    "runtime_online_replanning",
    "runtime_cluster_swap_enabled",
    "runtime_reconfigure_training",
    "runtime_training_pool_plan_only",
)


def minima_fit(config: RunConfig) -> Iterator[Problem]:
    """Check each side's minimum against what the run has."""
    planner = config.global_resource_planner
    train, rollout = config.training.train_gpus, config.rollout.rollout_gpus
    if planner_decides(config):
        needed = planner.min_train_gpus + planner.min_rollout_gpus
        if needed > train + rollout:
            yield Problem(
                path=f"{PLANNER}.min_train_gpus",
                what=f"the minima, {planner.min_train_gpus} + {planner.min_rollout_gpus}, exceed "
                f"the budget of {train + rollout} GPUs (train_gpus + rollout_gpus)",
                related=(f"{PLANNER}.min_rollout_gpus", "train_gpus", "rollout_gpus"),
            )
        return
    yield from _at_most("min_train_gpus", planner.min_train_gpus, "train_gpus", train)
    limit_name = "rollout_gpus"
    if not planner.runtime_manage_rollout_processes:
        endpoints = config.heterogeneous_rollout.endpoints
        if not endpoints:
            return  # which is said by itself
        limit_name, rollout = "heterogeneous_rollout.endpoints", sum(it.tp for it in endpoints)
    yield from _at_most("min_rollout_gpus", planner.min_rollout_gpus, limit_name, rollout)


def granularity_fits(config: RunConfig) -> Iterator[Problem]:
    """Check that the budget holds a step for each side."""
    planner = config.global_resource_planner
    if not planner_decides(config):
        return
    total, step = (
        config.training.train_gpus + config.rollout.rollout_gpus,
        planner.allocation_granularity_gpus,
    )
    if total % step or total < 2 * step:
        yield Problem(
            path=f"{PLANNER}.allocation_granularity_gpus",
            what=f"steps of {step} GPUs do not split a budget of {total} in two",
            hint=f"nearest: {one_of(nearest_divisors(min(step, total // 2), total))}",
            related=("train_gpus", "rollout_gpus"),
        )


def replica_size(config: RunConfig) -> Iterator[Problem]:
    """Check an explicit hybrid replica against the training topology."""
    size = config.global_resource_planner.elastic_hybrid_replica_size_gpus
    derived = model_parallel_size(config) * config.training.train_ep_size
    if size and size != derived:
        yield Problem(
            path=f"{PLANNER}.elastic_hybrid_replica_size_gpus",
            what=f"{size} is not the ranks of one TP x EP x PP x CP replica, {derived}",
            hint=f"write {derived}, or 0 to derive it",
            related=("train_tp_size", "train_ep_size", "train_pp_size", "train_cp_size"),
        )


def minimum_beside_replicas_fits(config: RunConfig) -> Iterator[Problem]:
    """Check that what rollout keeps beside replicas is not more than it can ever have."""
    planner = config.global_resource_planner
    if not planner.runtime_reconfigure_training:
        return
    kept, (total, words) = planner.elastic_hybrid_min_rollout_gpus, _gpus_there(config)
    most = total - planner.min_train_gpus
    if kept > max(most, 1):
        yield Problem(
            path=f"{PLANNER}.elastic_hybrid_min_rollout_gpus",
            what=f"{kept} is more than rollout can ever have, {most}: {words} is {total}, "
            f"min_train_gpus {planner.min_train_gpus}",
            hint=f"nearest: {most}",
            related=("train_gpus", "rollout_gpus", f"{PLANNER}.min_train_gpus"),
        )


def _gpus_there(config: RunConfig) -> tuple[int, str]:
    """What plans can use, with those that only an order may name, and in words what that is."""
    total, hardware = config.training.train_gpus + config.rollout.rollout_gpus, config.hardware
    there = 0 if hardware is None else hardware.nodes * hardware.gpus_per_node
    if there > total:
        return there, "hardware.nodes x hardware.gpus_per_node"
    return total, "train_gpus + rollout_gpus"


def replicas_have_room(config: RunConfig) -> Iterator[Problem]:
    """Warn where the minima are kept and the planner finds nothing to lend."""
    planner = config.global_resource_planner
    if not planner.runtime_reconfigure_training or not planner.elastic_hybrid_min_rollout_gpus:
        return
    total = config.training.train_gpus + config.rollout.rollout_gpus
    kept = max(planner.elastic_hybrid_min_rollout_gpus, planner.min_rollout_gpus)
    if kept >= total - planner.min_train_gpus:
        yield Problem(
            path=f"{PLANNER}.elastic_hybrid_min_rollout_gpus",
            what=f"of {total} GPUs {kept} for rollout and min_train_gpus "
            f"{planner.min_train_gpus} leave none to a hybrid replica",
            related=(
                "train_gpus",
                "rollout_gpus",
                f"{PLANNER}.min_train_gpus",
                f"{PLANNER}.min_rollout_gpus",
            ),
        )


_FEWEST_LEAD_STEPS = 2
"""In the first the core takes a snapshot, with the second the replica contributes."""


def last_server_may_be_lent(config: RunConfig) -> Iterator[Problem]:
    """Check that training could go on for a while without any server."""
    planner, path = config.global_resource_planner, f"{PLANNER}.elastic_hybrid_min_rollout_gpus"
    if planner.elastic_hybrid_min_rollout_gpus or not planner.runtime_reconfigure_training:
        return
    bound = config.rollout.max_head_offpolicyness
    if not planner.decouple_communication_domains:
        yield Problem(
            path=path,
            what="is 0, for replicas that borrow every server, and decouple_communication_domains "
            "is false: then there are no replicas",
            hint="write 1 or more",
            related=(f"{PLANNER}.decouple_communication_domains",),
        )
    elif bound < _FEWEST_LEAD_STEPS:
        yield Problem(
            path=path,
            what="is 0, for replicas that borrow every server: what rollouts have made by then "
            f"lasts for max_head_offpolicyness, {bound:g}, steps, and a replica needs "
            f"{_FEWEST_LEAD_STEPS} before it contributes",
            hint=f"a max_head_offpolicyness of {_FEWEST_LEAD_STEPS} or more, better several times "
            "that, or 1 here",
            related=("max_head_offpolicyness",),
        )


def expert_candidates(config: RunConfig) -> Iterator[Problem]:
    """Check allowed_train_ep against the experts."""
    arch = config.model_arch
    for index, ep in enumerate(config.global_resource_planner.allowed_train_ep):
        path = f"{PLANNER}.allowed_train_ep[{index}]"
        if arch is None or ep == 1:
            continue
        if not arch.num_experts:
            what = f"is {ep}, but {arch.architecture} has no experts"
            yield Problem(path=path, what=what, hint="nearest: 1", related=("model_arch",))
        elif arch.num_experts % ep:
            nearest = one_of(nearest_divisors(ep, arch.num_experts))
            what = f"{ep} does not divide the experts, {arch.num_experts}"
            yield Problem(path=path, what=what, hint=f"nearest: {nearest}", related=("model_arch",))


def master_switch(config: RunConfig) -> Iterator[Problem]:
    """Check that nothing of the elastic runtime is on without its master switch."""
    planner = config.global_resource_planner
    if planner.runtime_dynamic_reconfiguration_enabled:
        return
    for name in BEHIND_THE_MASTER_SWITCH:
        if getattr(planner, name):
            yield Problem(
                path=f"{PLANNER}.{name}",
                what=f"needs {MASTER_SWITCH}, which is false",
                hint="set that to true, or this to false",
                related=(MASTER_SWITCH,),
            )


def online_replanning_has_prices(config: RunConfig) -> Iterator[Problem]:
    """Check that what is looked at again and again can be priced at all."""
    if not config.global_resource_planner.runtime_online_replanning:
        return
    if config.hardware is None:
        yield Problem(
            path=f"{PLANNER}.runtime_online_replanning",
            what="needs a description of the hardware: no plan can be priced without it",
            hint="name a file with hardware_config (configs/hardware has some)",
            related=("hardware",),
        )


def swap_strategy(config: RunConfig) -> Iterator[Problem]:
    """Check that the strategy's own switch is on."""
    planner = config.global_resource_planner
    if (
        planner.runtime_rollout_reconfigure_strategy == "cluster_swap"
        and not planner.runtime_cluster_swap_enabled
    ):
        yield Problem(
            path=f"{PLANNER}.runtime_rollout_reconfigure_strategy",
            what="cluster_swap needs runtime_cluster_swap_enabled, which is false",
            hint="set that to true or choose diff",
            related=(f"{PLANNER}.runtime_cluster_swap_enabled",),
        )


def lent_servers_come_back(config: RunConfig) -> Iterator[Problem]:
    """Check that servers can be lent, and that one that has slept is of use afterwards."""
    planner, weights = config.global_resource_planner, config.weights
    if planner.runtime_lent_servers == "stop":
        return
    path = f"{PLANNER}.runtime_lent_servers"
    if not planner.runtime_reconfigure_training:
        yield Problem(
            path=path,
            what="sleep is for servers that are lent to training, which "
            "runtime_reconfigure_training: false forbids",
            hint="set that to true, or this to stop",
            related=(f"{PLANNER}.runtime_reconfigure_training",),
        )
    if (strategy := planner.runtime_rollout_reconfigure_strategy) in ("restart_all", "blue_green"):
        yield Problem(
            path=path,
            what=f"sleep keeps processes that {strategy} never comes back to",
            hint="nearest: stop; or choose diff, prewarm or cluster_swap",
            related=(f"{PLANNER}.runtime_rollout_reconfigure_strategy",),
        )
    if weights.rollout_weight_sync_mode == "none":
        yield Problem(
            path=path,
            what="sleep needs published weights: what a server holds afterwards is loaded anew",
            hint="nearest: stop",
            related=("rollout_weight_sync_mode",),
        )
    elif weights.rollout_weight_reload_method == "restart":
        yield Problem(
            path=path,
            what="sleep keeps processes that a reload by restart ends",
            hint="nearest: stop; or set rollout_weight_reload_method to inplace",
            related=("rollout_weight_reload_method",),
        )


def cluster_is_large_enough(config: RunConfig) -> Iterator[Problem]:
    """Check the GPUs that are used against those that `hardware` describes."""
    hardware = config.hardware
    if hardware is None or config.control.device == "cpu":
        return
    there = hardware.nodes * hardware.gpus_per_node
    is_ours = config.global_resource_planner.runtime_manage_rollout_processes
    used = config.training.train_gpus + (config.rollout.rollout_gpus if is_ours else 0)
    if used > there:
        yield Problem(
            path="hardware.nodes",
            what=f"{hardware.nodes} nodes x {hardware.gpus_per_node} GPUs are fewer than "
            f"train_gpus + rollout_gpus, {used}",
            hint=f"at least {-(-used // hardware.gpus_per_node)} nodes",
            related=("train_gpus", "rollout_gpus", "hardware.gpus_per_node"),
        )


def _at_most(name: str, value: int, limit_name: str, limit: int) -> Iterator[Problem]:
    if value > limit:
        yield Problem(
            path=f"{PLANNER}.{name}",
            what=f"{value} exceeds {limit_name}, {limit}",
            hint=f"nearest: {limit}" if limit else "",
            related=(limit_name,),
        )


RULES = (
    minima_fit,
    granularity_fits,
    replica_size,
    minimum_beside_replicas_fits,
    last_server_may_be_lent,
    expert_candidates,
    master_switch,
    online_replanning_has_prices,
    swap_strategy,
    lent_servers_come_back,
    cluster_is_large_enough,
)
WARNINGS = (replicas_have_room,)

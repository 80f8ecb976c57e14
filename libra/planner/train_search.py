"""Every training layout worth costing, and the fastest for each number of GPUs.

The tree is TP -> EP -> PP -> CP -> GPUs -> micro-batch. Each level asks first what needs no deeper
choice: divisibility, node boundary, communication ratio; then whether the most favourable leaf
below it (most data parallelism, smallest micro-batch) passes the bubble and memory limits. CP is
raised only until something fits, since it costs links and nothing else is gained by it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from math import inf

import msgspec

from libra.config.run import RunConfig
from libra.planner.cost_models import CostModels
from libra.planner.memory import MemoryBudget
from libra.planner.pipeline import bubble_fraction
from libra.planner.pruning import PruneLog
from libra.planner.train_cost import TrainCost, TrainWork
from libra.planner.train_layout import TrainLayout

_LARGEST_MICRO_BATCH_GROWTH = 8
_LARGEST_CP_GROWTH = 8
_ALIKE = 1.01
"""Step times this close are within what the model can tell apart."""


class TrainCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A feasible layout with its costs."""

    layout: TrainLayout
    cost: TrainCost
    budget: MemoryBudget


class TrainSearch:
    """Layouts of the core training pool for a set of GPU counts."""

    def __init__(
        self,
        config: RunConfig,
        *,
        models: CostModels,
        work: TrainWork,
        gpu_counts: Sequence[int],
        excluded: frozenset[TrainLayout] = frozenset(),
    ) -> None:
        """`gpu_counts` are the totals to consider, ascending. `excluded` layouts failed a probe."""
        self._config, self._work = config, work
        self._model, self._memory = models.train, models.train_memory
        self._gpu_counts, self._excluded = tuple(gpu_counts), excluded
        self._mini_batch = config.training.mini_batch_size or config.training.batch_size
        self._log = PruneLog()
        self._left_dps: dict[int, dict[str, set[int]]] = {}
        self._layouts_of: dict[int, list[TrainLayout]] = {count: [] for count in gpu_counts}
        for layout in self._feasible():
            self._layouts_of[layout.num_gpus].append(layout)
        for count, layouts in self._layouts_of.items():
            if not layouts:
                self._log.cut(f"{count} training GPUs", self._count_reason(count))

    @property
    def log(self) -> PruneLog:
        return self._log

    def best(self, num_gpus: int, *, num_best: int = 1) -> list[TrainCandidate]:
        """The fastest layouts that use exactly `num_gpus`, best first; fewer when there are.

        Layouts within `_ALIKE` of the fastest count as equally fast, and the one that leaves most
        memory comes first.
        """
        bounds = sorted(
            (self._model.lower_bound_s(layout, self._work), layout)
            for layout in self._layouts_of[num_gpus]
        )
        costed: list[TrainCandidate] = []
        enough_s = inf
        for bound_s, layout in bounds:
            if bound_s > enough_s:
                break
            cost = self._model.cost(layout, self._work)
            costed.append(
                TrainCandidate(layout=layout, cost=cost, budget=self._memory.budget(layout))
            )
            by_time = sorted(candidate.cost.total_s for candidate in costed)
            if len(by_time) >= num_best:
                enough_s = by_time[num_best - 1] * _ALIKE
        limit_s = min((c.cost.total_s for c in costed), default=0.0) * _ALIKE
        costed.sort(key=lambda c: (max(limit_s, c.cost.total_s), c.budget.total_bytes, c.layout))
        return costed[:num_best]

    def _feasible(self) -> Iterator[TrainLayout]:
        if not self._gpu_counts:
            return
        for tp in self._tp_degrees():
            for ep in self._ep_degrees(tp):
                for pp in self._pp_degrees(tp, ep):
                    yield from self._leaves(tp, ep, pp)

    def _tp_degrees(self) -> Iterator[int]:
        planner, arch = self._config.global_resource_planner, self._model.arch
        for tp in _allowed(planner.allowed_train_tp, self._gpu_counts[-1]):
            reason = self._tp_reason(tp)
            ratio = self._model.tensor_comm_ratio(tp)
            limit = planner.train_comm_compute_ratio_threshold
            if not reason and ratio > limit:
                reason = f"communication is {ratio:.2f} of computation, over {limit:g}"
            if reason:
                self._log.cut(f"TP{tp}", reason)
            else:
                yield tp
        if not arch.num_experts and any(ep > 1 for ep in planner.allowed_train_ep):
            self._log.cut("EP above 1", "the model has no experts")

    def _count_reason(self, num_gpus: int) -> str:
        """Why no layout has exactly this many GPUs."""
        left = self._left_dps.get(num_gpus)
        if not left:
            return "every allowed TP x PP x CP that divides it has a reason of its own"
        return "; ".join(_with_dps(dps, reason) for reason, dps in left.items())

    def _tp_reason(self, tp: int) -> str:
        """Why no layout with this TP can exist; empty when one may."""
        arch, node_gpus = self._model.arch, self._model.rates.gpus_per_node
        if tp > self._gpu_counts[-1]:
            return f"{self._gpu_counts[-1]} GPUs may train"
        if tp > node_gpus and not self._config.global_resource_planner.allow_cross_node_tp:
            return f"a node has {node_gpus} GPUs (allow_cross_node_tp is false)"
        if arch.num_attention_heads % tp:
            return f"{arch.num_attention_heads} attention heads do not divide by it"
        if arch.num_key_value_heads % tp and tp % arch.num_key_value_heads:
            return f"{arch.num_key_value_heads} key-value heads neither divide by it nor divide it"
        width = arch.moe_intermediate_size if arch.num_experts else arch.intermediate_size
        if width % tp:
            return f"the MLP's width {width} does not divide by it"
        return ""

    def _ep_degrees(self, tp: int) -> Iterator[int]:
        planner, arch = self._config.global_resource_planner, self._model.arch
        if not arch.num_experts:
            yield 1
            return
        limit = planner.train_ep_comm_compute_ratio_threshold
        for ep in _allowed(planner.allowed_train_ep, arch.num_experts):
            ratio = self._model.expert_comm_ratio(tp, ep)
            if arch.num_experts % ep:
                self._log.cut(f"TP{tp} EP{ep}", f"{arch.num_experts} experts do not divide by it")
            elif ratio > limit:
                self._log.cut(
                    f"TP{tp} EP{ep}", f"all-to-all is {ratio:.2f} of computation, over {limit:g}"
                )
            else:
                yield ep

    def _pp_degrees(self, tp: int, ep: int) -> Iterator[int]:
        planner, layers = self._config.global_resource_planner, self._model.arch.num_layers
        limit = planner.train_pipeline_bubble_ratio_threshold
        for pp in _allowed(planner.allowed_train_pp, self._gpu_counts[-1] // tp):
            branch = _branch(tp, ep, pp, 1)
            num_micro = -(-self._mini_batch // (ep * self._config.training.micro_batch_size))
            least = bubble_fraction(pp, num_micro)
            if layers % pp:
                self._log.cut(branch, f"{layers} layers do not divide into {pp} stages")
            elif tp * pp * ep > self._gpu_counts[-1]:
                self._log.cut(
                    branch, f"needs {tp * pp * ep} GPUs, {self._gpu_counts[-1]} may train"
                )
            elif least > limit:
                self._log.cut(
                    branch,
                    f"bubble {least:.2f} at best ({num_micro} micro-batches), over {limit:g}",
                )
            else:
                yield pp

    def _leaves(self, tp: int, ep: int, pp: int) -> Iterator[TrainLayout]:
        """Layouts at the smallest CP at which any fits."""
        smallest = self._config.training.train_cp_size
        largest = min(smallest * _LARGEST_CP_GROWTH, self._gpu_counts[-1] // (tp * pp))
        for cp in _powers(smallest, largest):
            found = False
            for layout in self._leaves_at(tp, ep, pp, cp):
                found = True
                yield layout
            if found:
                return

    def _leaves_at(self, tp: int, ep: int, pp: int, cp: int) -> Iterator[TrainLayout]:
        branch, model_parallel = _branch(tp, ep, pp, cp), tp * pp * cp
        dps = self._dps(model_parallel, ep)
        if not dps:
            self._log.cut(branch, self._no_dp_reason(model_parallel, ep))
            return
        smallest = self._config.training.micro_batch_size
        roomiest = TrainLayout(tp=tp, ep=ep, pp=pp, cp=cp, dp=dps[-1], micro_batch_size=smallest)
        if not (budget := self._memory.budget(roomiest)).fits:
            self._log.cut(branch, f"{budget} (at best, with DP{dps[-1]})")
            return
        for dp in dps:
            yield from self._micro_batches(msgspec.structs.replace(roomiest, dp=dp), branch)

    def _dps(self, model_parallel: int, ep: int) -> list[int]:
        """Data-parallel sizes of the GPU counts; those that do not work are remembered."""
        dps: list[int] = []
        for count in self._gpu_counts:
            dp, rest = divmod(count, model_parallel)
            if rest:
                continue
            if reason := self._dp_reason(dp, ep):
                self._left_dps.setdefault(count, {}).setdefault(reason, set()).add(dp)
            else:
                dps.append(dp)
        return dps

    def _dp_reason(self, dp: int, ep: int) -> str:
        """Why a run cannot have this DP; empty when it can."""
        if self._mini_batch % dp:
            return f"does not divide {self._mini_batch} trajectories per optimizer step"
        return f"is no multiple of EP{ep}" if dp % ep else ""

    def _no_dp_reason(self, model_parallel: int, ep: int) -> str:
        """Why no number of training GPUs gives a DP."""
        most = self._gpu_counts[-1]
        if model_parallel > most:
            return f"needs {model_parallel} GPUs, {most} may train"
        dps = [count // model_parallel for count in self._gpu_counts if not count % model_parallel]
        if not dps:
            return f"no number of training GPUs is a multiple of {model_parallel}"
        dps_of: dict[str, set[int]] = {}
        for dp in dps:
            dps_of.setdefault(self._dp_reason(dp, ep), set()).add(dp)
        return "; ".join(_with_dps(dps, reason) for reason, dps in dps_of.items())

    def _micro_batches(self, layout: TrainLayout, branch: str) -> Iterator[TrainLayout]:
        smallest, per_rank = layout.micro_batch_size, self._mini_batch // layout.dp
        largest = min(smallest * _LARGEST_MICRO_BATCH_GROWTH, per_rank)
        # A run takes whole micro-batches only.
        sizes = [size for size in _powers(smallest, largest) if per_rank % size == 0]
        if not sizes:
            self._log.cut(
                branch,
                f"no micro-batch of {smallest} times a power of two divides the {per_rank} "
                f"trajectories that a rank has per optimizer step (DP{layout.dp})",
            )
            return
        candidates = (msgspec.structs.replace(layout, micro_batch_size=size) for size in sizes)
        # A larger micro-batch needs more memory and leaves a larger bubble: the first to fail ends.
        yield from takewhile(lambda candidate: self._passes(candidate, branch), candidates)

    def _passes(self, layout: TrainLayout, branch: str) -> bool:
        limit = self._config.global_resource_planner.train_pipeline_bubble_ratio_threshold
        num_micro = -(-self._mini_batch // (layout.dp * layout.micro_batch_size))
        bubble = bubble_fraction(layout.pp, num_micro)
        budget = self._memory.budget(layout)
        kind, lack, reason = "", 0.0, ""
        if layout in self._excluded:
            kind, reason = "probe", "its recompute probe did not fit"
        elif not budget.fits:
            kind, reason = "memory", str(budget)
            lack = float(budget.total_bytes - budget.capacity_bytes)
        elif bubble > limit:
            kind, lack = "bubble", bubble - limit
            reason = f"bubble {bubble:.2f} ({num_micro} micro-batches), over {limit:g}"
        if kind:
            self._log.leave(layout, branch=branch, kind=kind, lack=lack, reason=reason)
        return not kind


def _allowed(configured: Sequence[int], largest: int) -> list[int]:
    """The configured degrees in ascending order, else powers of two up to `largest`."""
    return sorted(set(configured)) if configured else _powers(1, largest)


def _powers(first: int, last: int) -> list[int]:
    """`first` doubled again and again, up to `last`."""
    values = [first]
    while values[-1] * 2 <= last:
        values.append(values[-1] * 2)
    return values


def _with_dps(dps: Iterable[int], reason: str) -> str:
    """`DP 3, 6: does not divide 512 trajectories per optimizer step`."""
    return f"DP {', '.join(map(str, sorted(dps)))}: {reason}"


def _branch(tp: int, ep: int, pp: int, cp: int) -> str:
    expert = f" EP{ep}" if ep > 1 else ""
    context = f" CP{cp}" if cp > 1 else ""
    return f"TP{tp}{expert} PP{pp}{context}"

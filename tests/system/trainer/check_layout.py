"""Everything that is checked under one layout, in one start of torchrun, which takes seconds.

check_layout.py BACKEND TP PP CP EP MODELS SAVED OUTPUT PART...
Rank 0 writes what the parts return to OUTPUT as JSON. A part that fails raises.
"""

import json
import sys
from pathlib import Path

from check_equality import check_kinds, check_other_architectures
from check_guards import check_guards
from check_learning import learn_all
from check_resume import check_changed_all, check_spread_experts, go_on_all

from tiny_models import KINDS, WITH_EXPERTS
from trainer_ranks import joined_world, run_config


def main() -> None:
    models, saved, output = map(Path, sys.argv[6:9])
    names = ("train_tp_size", "train_pp_size", "train_cp_size", "train_ep_size")
    layout = {name: int(size) for name, size in zip(names, sys.argv[2:6], strict=True)}
    layout["train_backend"] = sys.argv[1]
    model = models / "qwen2"
    with joined_world(run_config(model, **layout)) as world:
        parts = {
            "equality": lambda: check_kinds(world, models, KINDS, **layout),
            "sequence_parallel": lambda: check_kinds(
                world, models, KINDS, megatron_sequence_parallel=True, **layout
            ),
            "packed": lambda: check_kinds(world, models, KINDS, layout="packed", **layout),
            "experts": lambda: check_kinds(
                world,
                models,
                WITH_EXPERTS,
                megatron_sequence_parallel=layout["train_tp_size"] > 1,
                **layout,
            ),
            "others": lambda: check_other_architectures(world, models, **layout),
            "learning": lambda: learn_all(world, model, **layout),
            "expert_learning": lambda: learn_all(
                world,
                models / "qwen3_moe",
                objectives=["plain"],
                megatron_sequence_parallel=layout["train_tp_size"] > 1,
                **layout,
            ),
            "guards": lambda: check_guards(world, model, **layout),
            "save": lambda: go_on_all(world, models, saved, "save", **layout),
            "restore": lambda: go_on_all(world, models, saved, "restore", **layout),
            "changed": lambda: check_changed_all(world, models, saved, **layout),
            "spread_experts": lambda: check_spread_experts(world, models, saved, **layout),
        }
        results = {name: parts[name]() for name in sys.argv[9:]}
        if world.at.rank == 0:
            output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

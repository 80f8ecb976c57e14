"""Everything that is checked under one layout, in one start of torchrun, which takes seconds.

check_layout.py TP PP CP MODELS SAVED OUTPUT PART...
Rank 0 writes what the parts return to OUTPUT as JSON. A part that fails raises.
"""

import json
import sys
from pathlib import Path

from check_equality import check_kinds
from check_guards import check_guards
from check_learning import learn_all
from check_resume import go_on_all

from tiny_models import KINDS
from trainer_ranks import joined_world, run_config


def main() -> None:
    models, saved, output = map(Path, sys.argv[4:7])
    sizes = zip(("train_tp_size", "train_pp_size", "train_cp_size"), sys.argv[1:4], strict=True)
    layout = {name: int(size) for name, size in sizes}
    model = models / "qwen2"
    with joined_world(run_config(model, **layout)) as world:
        parts = {
            "equality": lambda: check_kinds(world, models, KINDS, **layout),
            "sequence_parallel": lambda: check_kinds(
                world, models, KINDS, megatron_sequence_parallel=True, **layout
            ),
            "packed": lambda: check_kinds(world, models, KINDS, layout="packed", **layout),
            "learning": lambda: learn_all(world, model, **layout),
            "packed_learning": lambda: learn_all(world, model, layout="packed", **layout),
            "guards": lambda: check_guards(world, model),
            "save": lambda: go_on_all(world, model, saved, "save", **layout),
            "restore": lambda: go_on_all(world, model, saved, "restore", **layout),
        }
        results = {name: parts[name]() for name in sys.argv[7:]}
        if world.at.rank == 0:
            output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

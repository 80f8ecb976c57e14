"""An attempt that was taken for gone saves while a later one does, in the same directory.

check_stale.py MODEL DIRECTORY
Prints what became of each save.
"""

import os
import sys
from pathlib import Path

from libra.config.load import current_environ
from libra.errors import SiteError
from libra.storage.checkpoints import list_complete_checkpoints
from libra.storage.writer_claim import claim
from libra.wire.rank import SaveCheckpoint
from trainer_ranks import joined_world, no_beat, run_config


def main() -> None:
    model, directory = map(Path, sys.argv[1:])
    os.environ |= current_environ() | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }  # fmt: skip
    from libra.trainer import cpu_path

    cpu_path.enable()
    from libra.trainer.assembly import assemble
    from libra.trainer.checkpoint import StagedCheckpoint, stage_checkpoint

    def written(staged: StagedCheckpoint) -> str:
        try:
            staged.write()
        except SiteError as error:
            return str(error)
        return "written"

    with joined_world(run_config(model)) as world:
        trainer = assemble(run_config(model), world, beat=no_beat)
        target = directory / "step_000000"
        command = SaveCheckpoint(step=0, directory=str(target), rollout_state=b"old")
        later = SaveCheckpoint(step=0, directory=str(target), rollout_state=b"new")
        claim(directory, "trainer-1")
        old = stage_checkpoint(trainer, command, writer="trainer-1")
        claim(directory, "trainer-2")
        new = stage_checkpoint(trainer, later, writer="trainer-2")
        print(written(old))
        print(written(new))
        try:
            stage_checkpoint(trainer, command, writer="trainer-1")
        except SiteError as error:
            print(error)
    print([info.step for info in list_complete_checkpoints(directory, with_hashes=True)])
    print((target / "rollout_state.msgpack").read_bytes().decode())
    print(sorted(path.name for path in directory.iterdir()))


if __name__ == "__main__":
    main()

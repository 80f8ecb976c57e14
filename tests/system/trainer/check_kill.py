"""SIGKILL at every file operation of a save, one process per moment, all in one directory.

check_kill.py MODEL DIRECTORY
Prints one line for each moment: its number, what was going to be done, the newest complete step.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from libra.config.load import current_environ
from libra.storage.checkpoints import list_complete_checkpoints
from libra.wire.rank import SaveCheckpoint
from trainer_ranks import joined_world, make_samples, no_beat, run_config, train_step

VOCAB_SIZE = 250
MODIFYING = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
MOST_MOMENTS = 200


def main() -> None:
    model, directory = map(Path, sys.argv[1:])
    os.environ |= current_environ() | {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    # Imported once, before the processes that die.
    from libra.trainer import cpu_path

    cpu_path.enable()
    import libra.trainer.checkpoint  # noqa: F401

    assert run_child(model, directory, first_step=1, fatal=None) == 0
    for fatal in range(MOST_MOMENTS):
        status = run_child(model, directory, first_step=2, fatal=fatal)
        # What an attempt sees that comes after: nothing of a torn save, whatever was left.
        complete = list_complete_checkpoints(directory, with_hashes=True)
        print(fatal, status, [(info.step, info.newer_skipped) for info in complete], flush=True)
        if status == 0:
            return
        assert status == signal.SIGKILL
        shutil.rmtree(directory / "step_000002", ignore_errors=True)
    raise AssertionError("the save never ends")


def run_child(model: Path, directory: Path, *, first_step: int, fatal: int | None) -> int:
    pid = os.fork()
    if pid == 0:
        os.environ["MASTER_PORT"] = "0"
        train_and_save(model, directory, step=first_step, fatal=fatal)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def train_and_save(model: Path, directory: Path, *, step: int, fatal: int | None) -> None:
    from libra.trainer.assembly import assemble
    from libra.trainer.background import BackgroundWork
    from libra.trainer.checkpoint import restore_checkpoint, stage_checkpoint

    with joined_world(run_config(model)) as world:
        trainer = assemble(run_config(model), world, beat=no_beat)
        if step > 1:
            newest = list_complete_checkpoints(directory)[0]
            assert newest.step == step - 1
            restore_checkpoint(trainer, newest.directory)
        samples = make_samples(step, 2, VOCAB_SIZE)
        trainer.learner.train(train_step(step, [samples], dp_rank=0, dp_size=1))
        if fatal is not None:
            die_at(fatal, directory)
        target = directory / f"step_{step:06d}"
        command = SaveCheckpoint(step=step, directory=str(target), rollout_state=b"cursor")
        errors: list[Exception] = []
        behind = BackgroundWork(on_error=errors.append)
        behind.start(stage_checkpoint(trainer, command).write, name="checkpoint")
        behind.wait()
        assert not errors, errors


def die_at(fatal: int, directory: Path) -> None:
    """Kill this process before its file operation number `fatal` below `directory`."""
    moments = iter(range(10**6))

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in MODIFYING or not str(arguments[0]).startswith(str(directory)):
            return
        if next(moments) == fatal:
            print("killed before", event, arguments[0], flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()

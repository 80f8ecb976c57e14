"""`python -m libra.trainer` that misbehaves: HOSTILE names how, HOSTILE_STEP from which step on."""

import os
import signal
import sys

from libra import clock
from libra.config.load import current_environ
from libra.hybrid import member
from libra.hybrid.header import Fence
from libra.trainer.__main__ import main
from libra.trainer.rank_lines import mark_output

honest_send = member.MemberLane.send_gradient
honest_checksum = member.checksum


def send_badly(lane, fence, numbers, fill):
    how = current_environ()["HOSTILE"]
    if fence.step != int(current_environ()["HOSTILE_STEP"]):
        honest_send(lane, fence, numbers, fill)
        return
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "garbage":
        lane._channels[0].send(os.urandom(4096), deadline=clock.monotonic() + 10)
        return
    if how == "checksum":
        member.checksum = lambda values: honest_checksum(values) ^ 1
    if how == "fence":
        fence = Fence(fence.step, fence.mini_batch, fence.epoch - 1, fence.version)
    honest_send(lane, fence, numbers, spoiled(fill, how))
    member.checksum = honest_checksum


def spoiled(fill, how):
    def write(room):
        fill(room)
        if how == "nan":
            room[len(room) // 2] = float("nan")
        if how == "norm":
            room *= 1e4

    return write


def lie_about_weights():
    from libra.trainer.hybrid_gradients import GradientView

    honest = GradientView.weights_digest
    GradientView.weights_digest = lambda view: honest(view) ^ 1


if __name__ == "__main__":
    started_with = current_environ()
    mark_output(int(started_with["RANK"]))
    member.MemberLane.send_gradient = send_badly
    if started_with["HOSTILE"] == "digest":
        from libra.trainer import cpu_path

        cpu_path.enable()
        lie_about_weights()
    code = main(sys.argv[1:], started_with)
    sys.stdout.flush()
    os._exit(code)

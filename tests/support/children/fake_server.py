"""A FakeVllm as a process of its own, in the place of `libra.serving.launch`.

    fake_server.py HOST PORT [SERVED_DIRECTORY]

It says a line every tenth of a second, so that a log that goes on can be told from one that ended.
FAKE_SERVER is JSON: {"start_s": S} is how long the first process of the instance takes to answer,
{"slow": {INSTANCE: S}} the same for one of them,
{"ignores_sigterm": true} makes it deaf, with {"hides": true} it has a
descendant in a session of its own, as an engine behind an API server. {"second_waits": N} gives it
a second engine in which N requests wait. {"hangs": {INSTANCE: [PATH]}} and
{"fails": {INSTANCE: [PATH]}} are the switches of one instance.
"""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from fake_vllm import FakeVllm
from libra.serving.launch import wait_for_go
from libra.storage.manifests import read_manifest
from libra.wire.instance import (
    GO_FILE_VARIABLE,
    INCARNATION_VARIABLE,
    INSTANCE_ID_VARIABLE,
    RUN_ID_VARIABLE,
    TOKEN_FILE_VARIABLE,
)

host, port, *served = sys.argv[1:]
switches = json.loads(os.environ.get("FAKE_SERVER", "{}"))


def answer(prompt, body, version):
    """Ids that every tokenizer of the tests has; samples of a group differ, as their seeds do."""
    first = len(prompt) + version + (body.get("seed") or 0)
    return [20 + (first + k) % 60 for k in range(body["max_tokens"])]


async def main():
    server = FakeVllm(
        os.environ[INSTANCE_ID_VARIABLE],
        token=Path(os.environ[TOKEN_FILE_VARIABLE]).read_text().strip(),
        run_id=os.environ[RUN_ID_VARIABLE],
        answer=answer,
        host=host,
    )
    server.incarnation = os.environ[INCARNATION_VARIABLE]
    server.port = int(port)
    server.token_delay_s = 0.002
    server.second_engine_waits = switches.get("second_waits")
    server.hang |= set(switches.get("hangs", {}).get(server.instance_id, ()))
    server.fails |= set(switches.get("fails", {}).get(server.instance_id, ()))
    if switches.get("hides"):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    if served:
        manifest, server.manifest_hash = read_manifest(Path(served[0]))
        server.version = manifest.policy_version
    if go_file := os.environ.get(GO_FILE_VARIABLE):
        await anyio.to_thread.run_sync(wait_for_go, Path(go_file))
    slow = switches.get("slow", {})
    await anyio.sleep(slow.get(server.instance_id, switches.get("start_s", 0.0)))
    await server._listen()
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(chat, server)
            async for _ in signals:
                if not switches.get("ignores_sigterm"):
                    break
            tasks.cancel_scope.cancel()
    await server.stop()


async def chat(server):
    count = 0
    while True:
        count += 1
        # As logging does, it goes on when nobody reads what it says.
        with suppress(BrokenPipeError):
            print(f"line {count} of {server.incarnation}, v{server.version}", flush=True)
        await anyio.sleep(0.1)


anyio.run(main)

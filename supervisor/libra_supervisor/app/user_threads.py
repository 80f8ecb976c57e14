"""Threads that tools and workflows leave behind: one that hangs must not keep a run from ending."""

import asyncio
from concurrent.futures import ThreadPoolExecutor


class AbandonedThreads(ThreadPoolExecutor):
    """Where `asyncio.to_thread` runs. Its end waits for nobody, as that of the loop would."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002 - its base has it
        super().shutdown(wait=False, cancel_futures=cancel_futures)


def abandon_user_threads() -> None:
    """Let the running event loop end without its threads; the process is left by `cli.program`."""
    asyncio.get_running_loop().set_default_executor(AbandonedThreads())

"""A reward that takes its time and says whom it scores; loaded by name in reward workers."""

import time


def said(case):
    print(f"scored {case.prompt_id}", flush=True)
    time.sleep(0.1)
    return float(len(case.response_text) % 3)

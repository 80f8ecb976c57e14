"""A tool and a reward for questions whose answers stand in `corpus.jsonl`.

The tool ranks documents with BM25, by SQLite's full-text index in memory. The towns are invented,
so that a model can know none of this and has to look.
"""

import json
import re
import sqlite3
from functools import cache
from pathlib import Path
from threading import Lock

from libra.rewards.case import RewardCase

CORPUS = Path(__file__).with_name("corpus.jsonl")
MAX_DOCUMENTS = 3
_WORD = re.compile(r"\w+")
_LOCK = Lock()


def search(query: str) -> str:
    """Find documents about towns and their people. Returns the three that fit the query best."""
    words = _WORD.findall(query)
    if not words:
        return "nothing found: the query has no words"
    # Quoted, so that no word of a query is taken for an operator.
    wanted = " OR ".join(f'"{word}"' for word in words)
    with _LOCK:
        rows = (
            _index()
            .execute(
                "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank LIMIT ?",
                (wanted, MAX_DOCUMENTS),
            )
            .fetchall()
        )
    return "\n".join(f"[{title}] {text}" for title, text in rows) or "nothing found"


def answered(case: RewardCase) -> float:
    """1 when the last answer names the row's answer; 0.1 less for each turn beyond the third."""
    if str(case.answer).casefold() not in case.response_text.casefold():
        return 0.0
    return max(0.0, 1.0 - 0.1 * max(0, case.num_turns - 3))


@cache
def _index() -> sqlite3.Connection:
    # Tools run in threads; the lock is what keeps them apart.
    index = sqlite3.connect(":memory:", check_same_thread=False)
    index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter')")
    documents = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    index.executemany(
        "INSERT INTO documents VALUES (?, ?)", [(d["title"], d["text"]) for d in documents]
    )
    return index

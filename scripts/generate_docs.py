#!/usr/bin/env python3
"""Write the generated pages of docs/. `--check` writes nothing and fails when one is old."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "supervisor")]

from libra.config.reference import markdown  # noqa: E402 - after the path is set

PAGES = {ROOT / "docs" / "configuration.md": markdown}


def main() -> int:
    """Return 1 when --check finds an old page."""
    check = "--check" in sys.argv[1:]
    old = [page for page, write in PAGES.items() if not is_fresh(page, write())]
    for page in old:
        print(f"{page.relative_to(ROOT)}: {'is old; run' if check else 'written by'} {sys.argv[0]}")
        if not check:
            page.write_text(PAGES[page](), encoding="utf-8")
    return 1 if check and old else 0


def is_fresh(page: Path, text: str) -> bool:
    """Whether `page` holds `text` already."""
    return page.is_file() and page.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    raise SystemExit(main())

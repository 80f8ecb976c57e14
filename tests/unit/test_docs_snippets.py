"""Every YAML snippet in the documentation is a configuration that loads."""

import re
from pathlib import Path

import pytest

from libra.config.load import load_config
from libra_supervisor.validate.names import shipped_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "configs").rglob("*.md"))]  # fmt: skip
FENCE = re.compile(r"^```ya?ml[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    pytest.param(
        match[1],
        id=f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}",
    )
    for page in PAGES
    if page.is_file()
    for match in FENCE.finditer(page.read_text(encoding="utf-8"))
]


@pytest.mark.case("T-B05")
@pytest.mark.parametrize("text", SNIPPETS)
def test_a_yaml_snippet_is_a_valid_configuration(text: str, tmp_path: Path):
    """A snippet that sets no model is read as lines for configs/quickstart.yaml."""
    path = tmp_path / "snippet.yaml"
    text = text.replace("base_config: ", f"base_config: {ROOT}/configs/")
    if not re.search(r"^(base_config|model_path):", text, re.MULTILINE):
        text = f"base_config: {ROOT}/configs/quickstart.yaml\n{text}"
    path.write_text(text, encoding="utf-8")
    load_config(path, purpose="plan", shipped=shipped_names())


def test_there_are_snippets_to_check():
    assert SNIPPETS

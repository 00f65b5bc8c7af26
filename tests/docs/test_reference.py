"""The reference pages are what the code says, and links of the documentation lead somewhere."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs" / "reference" / "generate.py")
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_is_what_the_code_gives(name):
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert generate.PAGES[name]() == committed, "run: python docs/reference/generate.py"


def test_every_public_op_says_its_shapes_and_what_it_returns():
    page = generate.ops_page()
    functions = set(re.findall(r"^## (\w+)$", page, re.M)) - {"Cost", "Types", "debug", "use_backend"}
    assert len(functions) >= 20
    for name in functions:
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert "**Args**" in section and re.search(r"`: (int\d+ )?\[", section) and "Returns" in section, name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    prose = re.sub(r"^(```.*?^```|    .*?)$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", prose)
    assert [link for link in links if not (path.parent / link).exists()] == []

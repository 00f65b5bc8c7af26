"""No import circle: not even one that an import inside a function hides."""

import tomllib
from pathlib import Path

import grimp
import pytest

from linnet.companions import ROOMS, VERBS

ROOT = Path(__file__).parents[1]


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972), iteratively."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []
    for root in imports:
        work = [(root, iter(sorted(imports[root])))] if root not in index else []
        while work:
            module, rest = work[-1]
            if module not in index:
                index[module] = low[module] = len(index)
                stack.append(module)
            for other in rest:
                if other not in index:
                    work.append((other, iter(sorted(imports[other]))))
                    break
                if other in stack:
                    low[module] = min(low[module], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[module])
                if low[module] == index[module]:
                    part = stack[stack.index(module) :]
                    del stack[stack.index(module) :]
                    if len(part) > 1:
                        found.append(sorted(part))
    return found


@pytest.mark.parametrize(
    "imports, expected",
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [["b", "c"]]),
        ({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, [["d", "e"], ["a", "b", "c"]]),
    ],
)
def test_circles_are_found(imports, expected):
    assert sorted(circles(imports)) == sorted(expected)


def test_the_package_has_no_import_circle():
    graph = grimp.build_graph("linnet", cache_dir=None)  # with imports in functions and under TYPE_CHECKING
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200 and "linnet.models.recipes" in imports["linnet.models"]
    assert circles(imports) == []


def test_a_folder_fits_on_a_page():
    """At most 15 modules, `__init__` aside; in `ops` every op has a folder and the rest serves all of them."""
    sizes: dict[str, int] = {}
    for file in (ROOT / "linnet").rglob("*.py"):
        folder = file.parent.relative_to(ROOT).as_posix()
        sizes[folder] = sizes.get(folder, 0) + (file.stem != "__init__")
    assert sizes["linnet/layers"] > 5 and sizes.pop("linnet/ops") > 15
    assert {folder: size for folder, size in sizes.items() if size > 15} == {}


def test_the_picture_of_the_rooms_is_the_contract():
    """Floors in order, rooms side by side, companions above the double line; the table below has this order too."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").partition("## Layers of the package")[2]
    page = page.partition("\n## ")[0]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    [floors] = [contract["layers"] for contract in contracts if contract["name"] == "floors"]
    floors = [[name.strip(" ()") for name in floor.split("|")] for floor in floors]
    lines = [line.strip() for line in page.splitlines()]
    drawn = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith(("│", "╞"))]
    assert [row for row in drawn if row] == floors
    above = {name for row in drawn[: drawn.index([])] for name in row}
    assert above == {package.removeprefix("linnet.") for package in (VERBS | ROOMS).values()}
    height = {name: number for number, floor in enumerate(floors) for name in floor}
    table = [line.split("|")[1:-1] for line in lines if line.startswith("| `")]
    order = [height[name.strip(" `")] for name, *_ in table]
    assert order == sorted(order) and len(order) > 20
    looked_at = [path for *_, where in table for path in where.split("`")[1::2]]
    assert [path for path in looked_at if not (ROOT / "linnet" / path).exists()] == []

"""No import circle: not even one that an import inside a function hides."""

import grimp
import pytest


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

"""Private APIs of PyTorch and Triton are used in `compat_torch.py` and `compat_triton.py` alone."""

import re
from pathlib import Path

import pytest

import linnet

ROOT = Path(linnet.__file__).parent
TORCH = re.compile(
    r"\btorch(\.[a-z_]+)*\._[A-Za-z]"  # torch._C, torch.fx._x
    r"|\bfrom torch(\.[a-z_]+)*\._[A-Za-z]\S* import"  # from torch._dynamo import
    r"|\bfrom torch[a-z_.]* import \(?_[A-Za-z]"
    r"|\b(forward_ad|_functorch)\._"
    r"|\._(init_fn|opoverload|schema)\b"
)
TRITON = re.compile(
    r"\btriton(\.[a-z_]+)*\._[A-Za-z]|\bfrom triton(\.[a-z_]+)*\._[A-Za-z]\S* import"
    r"|\btriton\.(knobs|runtime|compiler)\b|\bfrom triton\.(knobs|runtime|compiler)\b"
    r"|\.(packed_metadata|device_caches|launch_enter_hook)\b"
)


def uses(pattern, allowed):
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.name != allowed:
            lines = path.read_text().splitlines()
            found += [
                f"{path.relative_to(ROOT)}:{i}: {line}" for i, line in enumerate(lines, 1) if pattern.search(line)
            ]
    return found


@pytest.mark.parametrize("pattern, allowed", [(TORCH, "compat_torch.py"), (TRITON, "compat_triton.py")], ids="12")
def test_private_symbols_are_in_one_file(pattern, allowed):
    assert uses(pattern, allowed) == []
    assert any(pattern.search(line) for line in (ROOT / "ops" / allowed).read_text().splitlines())


@pytest.mark.parametrize("line", ["torch._C._x()", "from torch._dynamo import y", "torch.fx._z", "op._opoverload"])
def test_a_private_symbol_is_found(line):
    assert TORCH.search(line)

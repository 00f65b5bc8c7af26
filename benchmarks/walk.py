"""How far does the configuration of a training travel before the first step, and how often do calls go upwards?

    python benchmarks/walk.py                    # the committed tree, with a tiny training on README.md
    python benchmarks/walk.py 65e887d9 HEAD --csv
    python benchmarks/walk.py --file FILE.yaml --show

Follows `linnet train FILE --plan`, and `linnet train FILE` up to the first step, with sys.setprofile. Prints the
distinct functions of Linnet that receive the training's configuration, their calls and their files, and the climbs:
direct calls from a package to one above it in the list of `pyproject.toml`, as of a function that was handed down. What
pydantic or typer calls does not count as a climb.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY = (
    "{name: walk, data: {source: [README.md]}, model: {d_model: 16, layout: tnl+sglu, options: {tnl: {num_heads: 2}}}, "
    "seq_len: 32, batch_size: 2, steps: 2, run: {device: cpu}}"
)


def floors() -> dict[str, int]:
    """Returns package or module of Linnet -> its floor, 0 at the bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["name"] == "floors"]
    return {name.strip(" ()"): floor for floor, row in enumerate(reversed(layers)) for name in row.split("|")}


class Walk:
    """Counts functions that receive the configuration, and calls that climb."""

    def __init__(self, package: Path):
        self.package, self.floors = f"{package}{os.sep}", floors()
        self.receivers: Counter[tuple[str, str]] = Counter()
        self.climbs: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame, event: str, argument) -> None:
        code, caller = frame.f_code, frame.f_back.f_code
        if event != "call" or not code.co_filename.startswith(self.package):
            return
        if code.co_qualname == "Session.gradients":
            raise KeyboardInterrupt  # the first step
        file, below = (name.co_filename.removeprefix(self.package) for name in (code, caller))
        if below != caller.co_filename and code.co_name != "<module>" and self.floor(file) > self.floor(below):
            self.climbs[f"{below}:{caller.co_qualname}", f"{file}:{code.co_qualname}"] += 1
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(type(frame.f_locals.get(name)).__name__ == "TrainConfig" for name in names):
            self.receivers[file, code.co_qualname] += 1

    def floor(self, file: str) -> int:
        return self.floors.get(file.partition(os.sep)[0].removesuffix(".py"), len(self.floors))


def walk(line: list[str]) -> dict:
    """Follows one command in this process and returns its numbers."""
    from typer.testing import CliRunner

    import linnet
    from linnet.cli import app

    CliRunner().invoke(app, [*line, "--plan"])  # what is imported or computed once does not count
    followed = Walk(Path(linnet.__file__).parent)
    sys.setprofile(followed)
    try:
        done = CliRunner().invoke(app, line)
    finally:
        sys.setprofile(None)
    assert done.exit_code in (0, 130), done.output
    return {
        "receivers": sorted((f"{file}:{name}", count) for (file, name), count in followed.receivers.items()),
        "climbs": sorted((f"{low} -> {high}", count) for (low, high), count in followed.climbs.items()),
    }


def numbers(tree: Path, text: str, plan: list[str], show: bool) -> dict[str, int]:
    """Follows one command with the package of a tree."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder) / "walk.yaml").write_text(text)
        command = [sys.executable, "-P", __file__, "--line", "train", str(file), *(plan or ["--out", folder])]
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    followed = json.loads(done.stdout.splitlines()[-1])
    if show:
        print(*(f"{count:4}  {name}" for name, count in [*followed["receivers"], *followed["climbs"]]), sep="\n")
    return {
        "functions": len(followed["receivers"]),
        "files": len({name.partition(":")[0] for name, _ in followed["receivers"]}),
        "calls": sum(count for _, count in followed["receivers"]),
        "climbs": sum(count for _, count in followed["climbs"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", default=["HEAD"])
    parser.add_argument("--file", type=Path, help="YAML of a training of text")
    parser.add_argument("--show", action="store_true", help="name the functions and the climbs")
    parser.add_argument("--csv", action="store_true", help="write benchmarks/results/walk.csv")
    parser.add_argument("--line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.line:
        print("\n" + json.dumps(walk(options.line)))
        return
    rows = []
    for commit in options.commits:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", commit, "linnet"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
            name = subprocess.run(["git", "rev-parse", "--short", commit], cwd=ROOT, capture_output=True, text=True)
            for plan in (["--plan"], []):
                row = {"commit": name.stdout.strip(), "walk": "plan" if plan else "first step"}
                text = options.file.read_text() if options.file else TINY
                rows.append(row | numbers(Path(folder), text, plan, options.show))
                print(rows[-1], flush=True)
    if options.csv:
        with open(ROOT / "benchmarks" / "results" / "walk.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*rows[0], "command"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | {"command": "python benchmarks/walk.py 65e887d9 HEAD --csv"} for row in rows)


if __name__ == "__main__":
    main()

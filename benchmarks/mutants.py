"""Do the tests notice a fault? Puts 50 seeded faults, one at a time, into what laws, folders and records rest on.

    python benchmarks/mutants.py --list           # the faults, which depend on the seed and the files alone
    python benchmarks/mutants.py                  # each against the tests of its file; about 10 s per fault
    python benchmarks/mutants.py --only 3 17      # some, which leaves results/mutants.csv as it is

A fault flips a comparison, adds one to a whole number, drops a `not`, or exchanges + with -, * with /, `and` with `or`.
It is killed if a test fails or does not end within the limit. One that survives is a hole in the tests, or changes
nothing that anyone can see. It stands in a copy of the package, so the working tree stays as it is.
"""

import argparse
import ast
import csv
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "mutants.csv"
COUNT, SEED, LIMIT = 50, 0, 60  # CPU seconds of the tests of one fault
SUBJECTS = {  # file below linnet -> tests of its subject
    "laws/fit/table.py": "laws/fit/test_fit_table.py",
    "laws/fit/reading.py": "laws/fit/test_fit_reading.py",
    "laws/fit/law.py": "laws/fit/test_fit_power.py",
    "laws/fit/power.py": "laws/fit/test_fit_power.py",
    "laws/fit/results.py": "laws/fit/test_fit_study.py",
    "laws/fit/selection.py": "laws/fit/test_fit_selection.py",
    "laws/orders.py": "laws/test_orders.py",
    "study/collect.py": "study/test_collect.py",
    "study/ladder.py": "study/test_ladder.py",
    "study/differences.py": "study/test_differences.py",
    "mad/run.py": "mad/test_run.py",
    "mad/bundle.py": "mad/test_run.py",
    "mad/scores.py": "mad/test_mad_scores.py",
    "mad/settings.py": "mad/test_settings.py",
    "data/parts.py": "corpus/test_stage.py",
    "corpus/stage.py": "corpus/test_stage.py",
    "runs/record.py": "runs/test_record.py",
    "runs/folder.py": "migration/test_folders.py",
    "papers/claims.py": "papers/test_claims.py",
    "papers/verbs/base.py": "papers/test_union.py",
}
FLIPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Div, ast.Div: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Changes(ast.NodeTransformer):
    """Counts the places of a file that can be faulty, and changes the one with the number `place`."""

    def __init__(self, place: int = -1):
        self.place, self.count, self.line = place, 0, 0

    def visit(self, node: ast.AST) -> ast.AST:
        node = self.generic_visit(node)
        changed = faulty(node)
        if changed is not None:
            if self.count == self.place:
                self.line, node = node.lineno, ast.copy_location(changed, node)
            self.count += 1
        return node


def faulty(node: ast.AST) -> ast.AST | None:
    """Returns an expression with its fault, or None if it has none to offer."""
    match node:
        case ast.Compare(left, [first, *ops], comparators) if type(first) in FLIPPED:
            return ast.Compare(left, [FLIPPED[type(first)](), *ops], comparators)
        case ast.BinOp(left, op, right) if type(op) in FLIPPED and not text(left) and not text(right):
            return ast.BinOp(left, FLIPPED[type(op)](), right)
        case ast.BoolOp(op, values):
            return ast.BoolOp(FLIPPED[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.Constant(value) if type(value) is int:
            return ast.Constant(value + 1)
    return None


def text(node: ast.AST) -> bool:
    """Returns whether an operand is a text or the end of a path, of which any change fails at once."""
    name, value = getattr(node, "id", ""), getattr(node, "value", None)
    return isinstance(node, ast.JoinedStr) or isinstance(value, str | bytes) or name.isupper()


def mutant(file: str, place: int) -> tuple[str, int, str]:
    """Returns the source of a file with one fault, its line, and what it changes."""
    source = (ROOT / "linnet" / file).read_text(encoding="utf-8")
    changes = Changes(place)
    after = ast.unparse(changes.visit(ast.parse(source))).splitlines()
    before = ast.unparse(ast.parse(source)).splitlines()
    [(old, new)] = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    return "\n".join(after) + "\n", changes.line, f"{old.strip()[:100]} -> {new.strip()[:100]}"


def choose() -> list[tuple[str, int]]:
    """Returns (file, place) of the seeded faults; each file has as many as the others, or one more."""
    draw, chosen = random.Random(SEED), []
    for number, file in enumerate(SUBJECTS):
        changes = Changes()
        changes.visit(ast.parse((ROOT / "linnet" / file).read_text(encoding="utf-8")))
        share = COUNT // len(SUBJECTS) + (number < COUNT % len(SUBJECTS))
        chosen += [(file, place) for place in sorted(draw.sample(range(changes.count), share))]
    return chosen


def judge(tree: Path, file: str, source: str) -> str:
    """Returns killed or survived: what the tests of a file say of its faulty source."""
    path = tree / "linnet" / file
    kept = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "pytest", "-qx", "-p", "no:cacheprovider", f"tests/{SUBJECTS[file]}"]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    limited = ["timeout", "900", "prlimit", f"--cpu={LIMIT}", *command]
    done = subprocess.run(limited, cwd=ROOT, env=environment, capture_output=True)
    path.write_text(kept, encoding="utf-8")
    return "killed" if done.returncode else "survived"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="run no test")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of faults")
    options = parser.parse_args()
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "linnet", Path(folder) / "linnet", ignore=shutil.ignore_patterns("__pycache__"))
        for number, (file, place) in enumerate(choose()):
            if options.only and number not in options.only:
                continue
            source, line, change = mutant(file, place)
            start = time.perf_counter()
            result = "" if options.list else judge(Path(folder), file, source)
            print(f"{number:2} {result:9}{time.perf_counter() - start:4.0f} s  {file}:{line}  {change}", flush=True)
            rows.append({"number": number, "file": file, "line": line, "change": change, "tests": SUBJECTS[file]})
            rows[-1] |= {"result": result, "command": "python benchmarks/mutants.py", "commit": commit.stdout.strip()}
            if not options.list and not options.only:
                with open(RESULTS, "w", newline="", encoding="utf-8") as results:
                    writer = csv.DictWriter(results, list(rows[0]), lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(rows)
    print(f"{sum(row['result'] == 'killed' for row in rows)} of {len(rows)} killed")


if __name__ == "__main__":
    main()

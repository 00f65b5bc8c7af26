"""Counts lines of code: without docstrings, comments and blank lines, so that thinner docstrings gain nothing.

python benchmarks/size.py                       # linnet, with its folders
python benchmarks/size.py linnet/study --at 65e887d9    # a folder at a commit
"""

import argparse
import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """Returns the number of lines that hold code."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in BLANK:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def sources(folder: str, commit: str | None) -> dict[str, str]:
    """Returns path -> source of every Python file of a folder, of the working tree or of a commit."""
    if commit is None:
        return {str(file.relative_to(ROOT)): file.read_text() for file in sorted((ROOT / folder).rglob("*.py"))}

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    names = git("ls-tree", "-r", "--name-only", commit, folder).splitlines()
    return {name: git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="linnet")
    parser.add_argument("--at", help="commit; default: the working tree")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    depth = len(PurePosixPath(options.folder).parts) + 1
    for name, source in sources(options.folder, options.at).items():
        counts["/".join(PurePosixPath(name).parts[:depth])] += code_lines(source)
    for name, count in sorted(counts.items(), key=lambda pair: -pair[1]):
        print(f"{count:8,}  {name}")
    print(f"{counts.total():8,}  {options.folder}")


if __name__ == "__main__":
    main()

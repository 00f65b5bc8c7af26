"""The table of rules in docs/corpus.md is what the code does."""

from pathlib import Path

from linnet.corpus.rules import APPLIED, FILTERS, Rules

PAGE = Path(__file__).parents[2] / "docs" / "corpus.md"


def rows() -> list[str]:
    found = []
    for name in (*APPLIED, *FILTERS):
        field = Rules.model_fields[name]
        settings = [
            f"`{key}` {str(value.default).replace('None', 'null').replace('False', 'false').replace('True', 'true')}: "
            f"{value.description}"
            for key, value in type(field.default).model_fields.items()
            if key != "enabled"
        ]
        found.append(f"| `{name}` | {field.description} | {'<br>'.join(settings)} |")
    return found


def test_the_table_of_rules():
    page = PAGE.read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if line.startswith("| `") and line.count(" | ") == 2]
    start = next(index for index, line in enumerate(table) if line.startswith("| `nfc`"))
    assert table[start : start + len(rows())] == rows()

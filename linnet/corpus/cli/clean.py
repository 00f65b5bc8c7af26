"""`linnet corpus clean`: applies rules to text, and counts and samples what each of them did."""

from pathlib import Path

from linnet.corpus.cli.stages import Anew, AsJson, Bar, Out, Sources, TextKey, Workers, run_and_show
from linnet.options import options


@options
def clean(
    source: Sources,
    *,
    out: Out,
    rules: Path | None = None,
    text_key: TextKey = "text",
    workers: Workers = 1,
    anew: Anew = False,
    as_json: AsJson = False,
) -> None:
    """Apply cleaning rules and document filters to text.

    Documents keep (source, file, row). Rows that cannot be read are counted and
    named. Markdown, LaTeX and code spans stay as they are.

    Example: [bold]linnet corpus clean stdlib pages.jsonl.gz --out clean --workers 2[/]

    Args:
        rules: YAML file of rules and filters (default: all rules).
    """
    from linnet.config import ConfigError, gather
    from linnet.corpus.documents import check_sources
    from linnet.corpus.rules import FILTERS, NAMES, Rules
    from linnet.corpus.rules.work import Clean
    from linnet.corpus.stage import run_stage

    problems: list[str] = []
    settings = Rules()
    with gather(problems):
        settings = settings if rules is None else Rules.read(rules)
    if problems:
        check_sources(source, "SOURCE", problems)
        raise ConfigError(problems, "clean")

    def run(bar: Bar) -> dict:
        options = {"workers": workers, "text_key": text_key, "anew": anew, "progress": bar}
        return run_stage("clean", source, out, settings, Clean(settings), **options)

    run_and_show(run, out, as_json, (*NAMES, *FILTERS))

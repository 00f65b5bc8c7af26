"""Prints the result of `linnet mad run --budget mqar`: accuracy by length and pairs, and the bar of paper 002."""


def print_recall(scores, console) -> None:
    """Prints a row per architecture and width."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from linnet.mad.mqar import HARDER, Place, settings_of
    from linnet.study.progress import count

    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True, title="MQAR: length, pairs", title_style="")
    table.add_column("architecture", overflow="fold", min_width=12)
    for column in ("width", *(f"{length},{pairs}" for length, pairs in HARDER), "params", "state"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in scores:
        settings = settings_of(scores, name)
        for width in sorted({place.width for place in settings}):
            own = [settings.get(Place(width, *shape)) for shape in HARDER]
            cells = ["-" if one is None else f"{one.score:.3f}" for one in own]
            run = next(run for one in own if one is not None for run in one.best.values())
            sizes = ["-" if run.parameters is None else count(run.parameters)]
            sizes.append("-" if run.state_size is None else f"{run.state_size:,}")
            table.add_row(escape(name), str(width), *cells, *sizes)
    console.print(table)


def bar(scores) -> str:
    """Returns a sentence on whether HGRN2 recalls more than HGRN; "" if one of them was not scored."""
    from linnet.mad.mqar import compare

    if not {"hgrn2", "hgrn"} <= set(scores):
        return ""
    found = compare(scores)
    return f"{found.claim}: {found.verdict}{found.told}"

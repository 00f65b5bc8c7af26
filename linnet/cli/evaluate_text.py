"""The part of `linnet evaluate` that scores texts: --text."""

from rich.console import Console
from rich.table import Table

from linnet.cli.evaluate_run import Opened, progress


def score_texts(opened: Opened, text: list[str], text_key: str, method: str, window: int, stride: int | None):
    """Scores the documents of files, prints what came of it, and gives the record."""
    from linnet.evaluate.results import Evaluation
    from linnet.evaluate.text import natural_method, read_texts, score_text

    if method == "auto":
        method = natural_method(opened.model.config)
    documents = read_texts(text, opened.tokenizer, text_key)
    total = sum(max(len(document.tokens) - 1, 0) for document in documents)
    with progress(opened, "tokens", total) as advance:
        score = score_text(opened.model, documents, method=method, window=window, stride=stride, progress=advance)
    if not opened.quiet:
        _show(score, opened.about["run"])
    asked = {"text": text, "text_key": text_key, "method": method, "window": score.window, "stride": score.stride}
    asked |= {"precision": opened.precision}
    return Evaluation("text", opened.about, asked, score.results(), score.to_dict())


def _short(perplexity: float) -> str:
    """Two digits behind the point; four in all where it is so large that nobody would count them."""
    return f"{perplexity:,.2f}" if perplexity < 1e6 else f"{perplexity:.4g}"


def _show(score, name: str) -> None:
    console = Console()
    way = f"windows of {score.window} tokens every {score.stride}" if score.window else "the carried state"
    documents = f"{len(score.documents):,} document{'s' if len(score.documents) != 1 else ''}"
    console.print(f"{name}: {documents} by {way}", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    low_high = score.interval()
    interval = f"95 % interval {low_high[0]:.4f} to {low_high[1]:.4f}" if low_high else ""
    table.add_row("bits per byte", f"{score.bits_per_byte:.4f}", interval)
    table.add_row("loss", f"{score.loss:.4f}", "nats a token")
    for what in ("perplexity", "word_perplexity", "byte_perplexity"):
        per = what.partition("_")[0] if "_" in what else "token"
        table.add_row("perplexity", _short(getattr(score, what)), f"by {per}")
    console.print(table)
    by_context = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("tokens of context", "loss", "tokens scored"):
        by_context.add_column(column, justify="right")
    for bucket in score.contexts:
        by_context.add_row(f"{bucket.start:,} to {bucket.end - 1:,}", f"{bucket.loss:.4f}", f"{bucket.tokens:,}")
    console.print(by_context)

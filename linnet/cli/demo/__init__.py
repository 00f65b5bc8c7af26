"""`linnet demo`: a small study from nothing to a report, with data and settings that ship with the package."""

from pathlib import Path

from linnet.config import ConfigError, parse
from linnet.options import Count, open_page, options


@options
def demo(
    *,
    quick: bool = False,
    workers: Count | None = None,
    vision: bool = False,
    out: Path | None = None,
    open_: bool = False,
) -> None:
    """Train five architectures on real text, fit their scaling laws, and write a report.

    It needs the extra study and no network: the text is the source of Python's
    standard library. On two CPU cores it takes about nine minutes. Stop it at
    any time: the same command resumes it. A clone has the study file as
    configs/demo.yaml.

    [bold]linnet demo[/]

    [bold]linnet demo --quick[/]

    [bold]linnet demo --vision[/]

    Args:
        quick: Two architectures and six runs, in about a minute: does everything work?
        workers: Runs at the same time. Default: one per GPU, or one per CPU core.
        vision: Images instead: three classifiers of digits side by side, in some minutes.
        out: Folder of studies; the demo gets a folder in it (default: studies; runs with --vision).
        open_: Show the report in the browser.
    """
    from linnet.cli.study import make_study, read_shipped
    from linnet.study.config import StudyConfig

    if vision:
        page = _show_vision(quick, workers, out)
    else:
        values = read_shipped("demo-quick" if quick else "demo")
        if workers is not None:
            values["executor"] = {"workers": workers}
        page = make_study(parse(StudyConfig, values, "demo"), out or Path("studies"), where="demo")
    if open_ and page is not None:
        open_page(page)


def _show_vision(quick: bool, workers: int | None, out: Path | None) -> Path:
    from linnet.companions import Offer

    demos = Offer("demos")
    if "vision" not in demos:
        raise ConfigError(["--vision: needs the package linnet.vision, which is not installed"], "demo")
    if quick:
        raise ConfigError(["--quick: has no effect with --vision, which has one size; leave it out"], "demo")
    return demos["vision"]((out or Path("runs")) / "vision-demo", workers)

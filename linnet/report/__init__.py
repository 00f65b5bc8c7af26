"""Figures and pages from records: `write_report(study_folder)` writes one offline page and a picture of each figure.

Files: `units` (numbers as people read them), `style` (colours, axes, themes), `records` (the study folder, read once),
`laws` (what is asked of the fits), `drawing` (pieces that figures share), `figures`, `tables`, `downstream` (the
evaluations of the runs, from compute to loss to metric), `further` (the further laws), `findings` (the headlines in
words), `page` (what stands on it), `shell` (with page.css and page.js). Pages of their own: `mad`, `compare` (models
side by side) with `needle`, `run` (one training), `vision` (classifiers, samples of denoisers), `corpus` (the stages of
a corpus, and the review).

`write_report` is imported when it is first used, so that the other parts need no pandas.
"""

from linnet.deprecation import lazily

__all__ = ["write_report"]

__getattr__ = lazily(__name__, {"write_report": "page"})

"""Figures and pages from records: `write_report(study_folder)` writes one offline page and a picture of each figure.

units.py    numbers as people read them
style.py    colours, axes, themes
records.py  the study folder, read once, with its fits
marks.py    pieces that figures share
figures.py, run_figures.py   the figures
tables.py   the tables
findings.py the headlines, in words
page.py     the page (page.css, page.js)
"""

from linnet.report.page import write_report

__all__ = ["write_report"]

"""Scores of masked language models, on GLUE and on the Long Range Arena."""

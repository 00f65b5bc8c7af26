"""Scores of bidirectional language models: masked text and GLUE."""

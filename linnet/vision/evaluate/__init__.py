"""Scores of classifiers and of samples."""

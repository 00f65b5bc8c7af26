"""Objectives on masked text, sentences and long sequences."""

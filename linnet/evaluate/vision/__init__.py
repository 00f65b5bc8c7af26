"""Scores of image models: accuracy, and distances between sets of images."""

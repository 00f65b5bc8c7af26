"""Objectives on images, and their evaluations during training."""

"""Pages of image models."""

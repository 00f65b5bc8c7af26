"""The page of one run, and its figures."""

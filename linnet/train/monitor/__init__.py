"""What watches a run: time, losses that spike, Ctrl-C, the line on the terminal, other loggers."""

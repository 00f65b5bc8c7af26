"""What a training takes, before it starts (`plan`, `footprint`) and as images per second (`throughput`)."""

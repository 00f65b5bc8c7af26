"""Many small models in one batched step: runs in lockstep, stacked weights, layers as matrix products."""

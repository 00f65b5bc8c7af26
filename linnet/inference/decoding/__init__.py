"""A model's step on fixed memory: slots of states, pending buffers, limited caches, merged products, precision."""

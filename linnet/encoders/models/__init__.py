"""Models whose tokens see all others: masked language models, and heads on sentences and on sequences."""

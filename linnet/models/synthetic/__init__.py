"""Models for synthetic tasks: the auto-encoder of compression, losses at few targets, vocabularies padded to a size."""

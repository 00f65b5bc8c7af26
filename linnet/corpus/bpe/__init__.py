"""A BPE over whole characters with a byte fall-back, learned from the stages of a corpus."""

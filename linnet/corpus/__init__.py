"""Cleaning of text corpora: reading sources as documents, stages that resume (`stage`), `rules`, `dedup`, `bpe`."""

"""Perplexity of texts: held-out tokens (`perplexity`), whole documents (`text`), blocks without memory (`blocks`)."""

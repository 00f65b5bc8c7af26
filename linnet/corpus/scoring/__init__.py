"""Self-cleaning of a corpus: a model that reads one half of the documents scores the other half, and the worst are cut.

score.py     nats per byte of every document, from one model or from two that each read one half;
             leaves out the worst documents of each source; both tails are shown
sample.py    documents for people to judge, by source and by decile of the score; what people
             decided, with intervals, and whether the loop goes on
loop.py      rounds of training, scoring, filtering and sampling

After paper 001, appendix D (its self-cleaning scheme). Two departures, which docs/corpus.md explains: no model scores
text that it was trained on, and the cut is a share of each source, because the paper does not give its threshold.
"""

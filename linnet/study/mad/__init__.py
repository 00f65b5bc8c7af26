"""MAD (paper 004): a skill score of any architecture.

settings.py                       the 66 settings, the six (learning rate, weight decay) points, and budgets of runs
architectures.py, state.py        models by recipe or layout, normalised to a fixed state of 4,096
run.py, bundle.py                 the runs of a budget, trained in bundles
results.py, scores.py             runs as rows; scores with their spread over seeds
traits.py, checks.py              what a name says of a design; the paper's findings, checked on pairs
correlate.py                      scores against compute-optimal loss
"""

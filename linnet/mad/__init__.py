"""MAD (paper 004), a skill score of any architecture, and MQAR, a separate benchmark of recall.

settings.py                       the 66 settings, the six (learning rate, weight decay) points, and budgets of runs
architectures.py                  models by recipe or layout, normalised to a fixed state of 4,096; those of MQAR
run.py, bundle.py, training.py    the runs of a budget, trained in bundles; the forms of training
results.py, scores.py             runs as rows, designs; scores with their spread over seeds; published scores
checks.py                         the paper's findings, checked on pairs
waterfall.py                      what separates our scores from published ones, one cause at a time
correlate.py                      scores against compute-optimal loss
"""

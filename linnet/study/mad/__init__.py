"""MAD (paper 004): what a skill score of an architecture is made of.

settings.py   the 66 settings, the six (learning rate, weight decay) points, and the budgets of runs
"""

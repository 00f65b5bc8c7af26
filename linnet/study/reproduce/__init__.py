"""`linnet reproduce`: tables and figures of the papers as data, run through the verbs that exist.

item.py      Item, Step, Form, Paper: what a file of items/ holds
claims.py    claims that can be false, and verdicts on them
items/       <paper>/<item>.yaml, <paper>/paper.yaml, data.yaml
"""

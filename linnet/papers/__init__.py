"""`linnet reproduce`: tables and figures of the papers as data, run through the verbs that exist.

item.py      Item, Step, Form, Paper: what a file of items/ holds
claims.py    claims that can be false, and verdicts on them
work.py      what to do, and an item that is checked for it
prepare.py   checks and prices items before any work
run.py       runs what is missing, and writes the table
table.py     measured numbers beside the printed ones, and the verdicts
items/       <paper>/<item>.yaml, <paper>/paper.yaml, data.yaml
"""

"""The verbs of items: each module runs what its command runs, through the same library functions.

VERB.check(job)                      -> Cost; raises ConfigError with all problems, does no work
VERB.run(job, earlier, console)      does what is missing for the seeds of the job
VERB.collect(job, planned, earlier)  -> Outcome: flat records (label, seed, numbers) of what all calls have done
"""

import importlib

from linnet.papers.verbs.base import EXACT, Cost, Job, Outcome, Record, Verb

__all__ = ["EXACT", "Cost", "Job", "Outcome", "Record", "Verb", "find_verb"]


def find_verb(name: str) -> Verb:
    """Returns the module of a verb. Importing it imports torch."""
    return importlib.import_module(f"{__name__}.{name}")

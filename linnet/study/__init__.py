"""Studies: plan a ladder of models, train it with an executor, and fit scaling laws to the results.

    config.py     StudyConfig: architectures x budgets x sizes; read_study
    ladder.py     plan(config): the runs, their exact FLOPs, the dropped points and the reasons
    timing.py     estimates how long a plan takes on this machine
    executors.py  inline, a pool of processes, Ray: one interface
    runner.py     run_study(config): plan, train the missing runs, collect
    collect.py    collect(folder): the run folders as one table; load_study(folder): with curves, for `linnet.laws`
    sensitivity.py  the loss at half and two times the learning rate

Names are imported on first use, so that `linnet.study.collect` works without torch.
"""

from linnet.deprecation import lazily

_HOME = {
    "StudyConfig": "config",
    "read_study": "config",
    "Plan": "ladder",
    "PlannedRun": "ladder",
    "plan": "ladder",
    "StudyResult": "runner",
    "run_study": "runner",
}

__all__ = sorted(_HOME)

__getattr__ = lazily(__name__, _HOME)

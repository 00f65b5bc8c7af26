"""Many runs, one question: ladders of models, executors that train them, and the fits of what they found.

    config.py     StudyConfig: architectures x budgets x sizes
    ladder.py     plan(config): the runs, their exact FLOPs, what was dropped and why
    timing.py     how long the plan will take on this machine
    executors.py  inline, a pool of processes, Ray: one interface
    runner.py     run_study(config): plan, train what is missing, collect
    collect.py    collect(folder): the run folders as one table
    fit/          scaling laws from that table

Names are imported when they are first used, so that `linnet.study.fit` needs no torch.
"""

import importlib

_HOME = {
    "StudyConfig": "config",
    "Plan": "ladder",
    "PlannedRun": "ladder",
    "plan": "ladder",
    "StudyResult": "runner",
    "run_study": "runner",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

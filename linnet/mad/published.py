"""Scores of MAD that others published, and which scores of ours may stand beside them.

Accuracies in per cent: Figure 3 of arXiv:2406.06484, with the results of paper 004's authors for these architectures.
They are those of the published implementation: other tasks, training, layers and numbers than the paper describes.
"""

TASKS = (
    "compression",
    "fuzzy_recall",
    "in_context_recall",
    "memorization",
    "noisy_recall",
    "selective_copying",
    "all",
)
PUBLISHED: dict[str, dict[str, float]] = {
    name: dict(zip(TASKS, values, strict=True))
    for name, values in {
        "mad-attention-swiglu": (51.6, 29.8, 94.1, 85.2, 86.8, 99.6, 74.5),
        "mad-hyena-swiglu": (45.2, 7.9, 81.7, 89.5, 78.8, 93.1, 66.0),
        "mad-mh-hyena-swiglu": (44.8, 14.4, 99.0, 89.4, 98.6, 93.0, 73.2),
        "mad-mamba": (52.7, 6.7, 90.4, 89.5, 90.1, 86.3, 69.3),
        "mad-gla-swiglu": (38.8, 6.9, 80.8, 63.3, 81.6, 88.6, 60.0),
    }.items()
}
BUDGET = "published"
_OTHERS = {
    "core": "it has 6 of 66 settings, the easiest",
    "full": "its tasks, training and layers are the paper's, not those of the published implementation",
    "screen": "it has 26 of 66 settings at 4 of 6 points, and scores are comparable with other screen scores only",
}


def refusal(budget: str) -> str | None:
    """Returns why scores of a budget cannot stand beside published ones; None if they can."""
    if budget == BUDGET:
        return None
    why = _OTHERS.get(budget, "its runs are too few or too short")
    return f"scores of the budget {budget} are not shown beside published scores: {why}; run --budget {BUDGET}"

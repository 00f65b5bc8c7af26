"""A softmax model that learns the easy task from nothing finds every needle: what the whole evaluation rests on."""

import numpy as np
import torch

from linnet.cli.evaluate_demo import read_plan
from linnet.config import parse
from linnet.evaluate.needle import NeedleConfig, run_needle
from linnet.evaluate.needle_lessons import write_lessons
from linnet.evaluate.needle_scores import needle_scores
from linnet.inference import Engine
from linnet.runs import load_model
from linnet.train import TrainConfig, train

MODEL = {
    "d_model": 64,
    "layout": "attention+swiglu x2",
    "options": {"attention": {"num_heads": 4}},
    "init_std": 0.125,
}


def test_a_softmax_model_learns_to_find_every_needle(tmp_path):
    """At the lengths of the demo's first lessons; configs/needles.yaml goes on to longer ones."""
    plan = read_plan()
    stage = plan["stages"][0]
    path = write_lessons(tmp_path / "lessons.jsonl", **stage["lessons"], seed=0)
    values = {
        **plan["train"],
        **stage["train"],
        "model": MODEL,
        "steps": 450,
    }  # how long the plateau is depends on the seed
    values["optimizer"] = {"learning_rate": 5e-3, "weight_decay": 0.0}
    values["data"] = {"source": [str(path)], "tokenizer": plan["tokenizer"]}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests run side by side
    try:
        run = train(parse(TrainConfig, values), tmp_path / "runs", tmp_path / "cache")
        model, tokenizer = load_model(run.path)
        engine = Engine(model, tokenizer, slots=20, context_length=128)
        config = NeedleConfig(lengths=[56, 64], depths=[0.0, 0.5, 1.0], samples=5, digits=2)
        grid = run_needle(engine, config)
        assert grid.tolist() == np.ones((3, 2)).tolist()
        assert needle_scores(grid).score == 1.0
    finally:
        torch.set_num_threads(threads)

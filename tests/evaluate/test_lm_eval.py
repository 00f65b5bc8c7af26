"""The harness's own command with `--model linnet`, from its command line, on a local task."""

import json
import sys
from functools import partialmethod

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra eval")

from linnet.data import ByteTokenizer
from linnet.models import build_model, family
from linnet.runs import load_model, save_model

TASK = """
task: local_pick
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}/pick.jsonl}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("harness")
    config = family("tnl")(32, 1, vocab_size=256)
    save_model(path / "model", config, build_model(config, seed=3).state_dict(), ByteTokenizer())
    rows = [{"question": f"is {n} odd", "choices": ["yes", "no"], "answer": n % 2} for n in range(8)]
    (path / "pick.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "pick.yaml").write_text(TASK.format(path=path))
    return path


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Runs the command as from a shell; returns its exit status and its two outputs.

    The harness does not look at its 10,000 own tasks first, which takes it 10 seconds.
    """
    from lm_eval.tasks import TaskManager

    from linnet import lm_eval

    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lm_eval", *map(str, arguments)])
        try:
            lm_eval.main()
            status = 0
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_device_it_runs_on_the_cpu(command, folder):
    given = f"pretrained={folder / 'model'}"
    status, out, err = command(
        "--model", "linnet", "--model_args", given, "--tasks", "local_pick", "--include_path", folder, "--limit", "2"
    )
    assert status == 0 and "local_pick" in out, err


def test_its_options_reach_the_harness(command, folder, tmp_path):
    given = f"pretrained={folder / 'model'},max_length=64"
    options = ["--tasks", "local_pick", "--include_path", folder, "--limit", "5", "--batch_size", "2", "--log_samples"]
    status, out, _ = command(
        "--model", "linnet", "--model_args", given, *options, "--device", "cpu", "--output_path", tmp_path / "found"
    )
    assert status == 0 and "local_pick" in out
    [file] = (tmp_path / "found").rglob("results_*.json")
    values = json.loads(file.read_text())
    assert values["n-samples"]["local_pick"]["effective"] == 5
    assert values["config"]["model"] == "linnet" and values["config"]["model_num_parameters"] > 0
    [samples] = (tmp_path / "found").rglob("samples_local_pick_*.jsonl")
    answers = [json.loads(line) for line in samples.read_text().splitlines()]
    # Without the harness: the model's log-likelihood of each answer to a question.
    model, _ = load_model(folder / "model")
    for answer in answers:
        for choice, found in zip(("yes", "no"), answer["filtered_resps"], strict=True):
            question = f"{answer['doc']['question']} Answer:"
            ids = torch.tensor([list(f"{question} {choice}".encode())])
            with torch.no_grad():
                logs = model(ids[:, :-1])[0].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, len(question) - 1 :]
            assert float(found[0]) == pytest.approx(logs.sum().item(), rel=1e-4)


def test_wrong_arguments_are_named_together(command, folder):
    tasks = ("--tasks", "local_pick", "--include_path", folder)
    wrong = "pretraind=x,dtype=float7,max_length=0"
    status, _, err = command("--model", "linnet", "--model_args", wrong, *tasks, "--batch_size", "0")
    assert status == 2
    assert all(part in err for part in ("'pretrained'", "float7", "max_length: ", "batch_size: ", "5 problems"))
    status, _, err = command("--model", "linnet", "--model_args", f"pretrained={folder / 'none'}", *tasks)
    assert status == 2 and "none: does not exist" in err
    given = f"pretrained={folder / 'model'}"
    status, _, err = command("--model", "linnet", "--model_args", given, *tasks, "--apply_chat_template")
    assert status == 2 and "--apply_chat_template" in err

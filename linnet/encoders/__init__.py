"""Models whose tokens see all others: masked language models, GLUE, and the Long Range Arena.

config.py    configurations of models    models/    masked language model, models of sentences and of sequences
masking.py   which tokens are hidden     glue.py    sentences and labels    lra/   long sequences and labels
train/       objectives                  evaluate/  scores                  cli/   commands

The core finds all this by `OFFERS` (`linnet.companions`). This module imports nothing, so that `--help` is instant.
"""

OFFERS = {
    "kinds": {
        "masked_lm": "linnet.encoders.models:MASKED_LM",
        "sentence": "linnet.encoders.models:SENTENCE",
        "sequence": "linnet.encoders.models:SEQUENCE",
    },
    "objective_kinds": {"masked": "masked_lm", "sentences": "sentence", "sequences": "sequence"},
    "recipes": {"bert": "linnet.encoders.models:crammed_bert"},
    "objectives": {
        "masked": "linnet.encoders.train:MaskedObjective",
        "sentences": "linnet.encoders.train:SentenceObjective",
        "sequences": "linnet.encoders.train:SequenceObjective",
    },
    "tables": dict.fromkeys(("masked", "sentences", "cola", "glue", "lra"), "linnet.encoders.cli.verbs:show_numbers"),
    "tasks": {"lra": "linnet.encoders.lra.task:TASKS"},
    "commands": {
        "data lra": "linnet.encoders.cli.verbs:make_lra",
        "evaluate masked": "linnet.encoders.cli.verbs:evaluate_masked",
        "evaluate glue": "linnet.encoders.cli.verbs:evaluate_glue",
        "evaluate lra": "linnet.encoders.cli.verbs:evaluate_lra",
    },
}

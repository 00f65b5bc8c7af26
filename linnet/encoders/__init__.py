"""Models whose tokens see all others: masked language models, GLUE, and the Long Range Arena.

config.py    configurations of models    models/    masked language model, models of sentences and of sequences
masking.py   which tokens are hidden     glue.py    sentences and labels    lra/   long sequences and labels
train/       objectives                  evaluate/  scores                  cli/   commands

The core finds all this by `OFFERS` (`linnet.companions`). This module imports nothing, so that `--help` is instant.
"""

OFFERS = {
    "kinds": {
        "masked_lm": "linnet.encoders.models.masked_lm:KIND",
        "sentence": "linnet.encoders.models.sentence:KIND",
        "sequence": "linnet.encoders.models.sequence:KIND",
    },
    "objective_kinds": {"masked": "masked_lm", "sentences": "sentence", "sequences": "sequence"},
    "recipes": {"bert": "linnet.encoders.models.bert:bert"},
    "objectives": {
        "masked": "linnet.encoders.train.masked:MaskedObjective",
        "sentences": "linnet.encoders.train.sentences:SentenceObjective",
        "sequences": "linnet.encoders.train.sequences:SequenceObjective",
    },
    "tables": dict.fromkeys(("masked", "sentences", "cola", "glue", "lra"), "linnet.encoders.cli.show:show_numbers"),
    "tasks": {"lra": "linnet.encoders.lra.task:TASKS"},
    "commands": {
        "data lra": "linnet.encoders.cli.lra:make_lra",
        "evaluate masked": "linnet.encoders.cli.evaluate:masked",
        "evaluate glue": "linnet.encoders.cli.evaluate:glue",
        "evaluate lra": "linnet.encoders.cli.evaluate:lra",
    },
}

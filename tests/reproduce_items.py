"""The package's library of items, read once for all tests, and a small one in its form."""

from pathlib import Path

from linnet.papers.library import Library, read_library

LIBRARY = read_library()

PAPER = "title: A paper\nname: small\n"
TRAIN = """
title: two layers
state: complete
where: [layers/mixers/linear/tnl.py]
note: a note
published:
  source: Table 1
  columns: {loss: nats per token, parameters: millions}
  rows:
    tnl: {loss: 2.0, parameters: 0.03}
    attention: {loss: 2.5}
    missing: {loss: 1.0}
  base: attention
  tolerance: {loss: 2 %}
  errata: [{row: attention, column: loss, printed: 2.5, corrected: 2.4, why: a slip}]
claims:
  - tnl < attention on loss
  - 0 < tnl on parameters
  - missing < tnl on loss
full: &form
  minutes: 1
  throughput: 1e9
  seeds: [0, 1]
  steps:
    - verb: train
      config:
        {seq_len: 32, batch_size: 4, steps: 4, optimizer: {learning_rate: 3e-3}, evaluate_tokens: 1024,
         data: {source: TEXT, tokenizer: byte}, run: {checkpoint_every: 1}}
      vary:
        tnl: {model: {layout: tnl+sglu, d_model: 16}}
        attention: {model: {layout: attention+swiglu, d_model: 16}}
      columns: {parameters: params_total / 1e6}
reduced: {<<: *form, differs: it is small}
"""
DATA = """
title: with data
state: partial
published: {source: Table 2, columns: {loss: nats}, rows: {a: {}, b: {}}}
claims: [a < b on loss]
full: {needs: [books], device: cluster, steps: [{verb: models, config: {recipes: [tnl-10m]}}]}
reduced:
  steps:
    - {verb: models, config: {recipes: [tnl-10m]}, rows: {tnl-10m: a}, columns: {loss: params_total}}
    - {verb: models, name: second, needs: [books], config: {recipes: [hgrn2-10m]}, rows: {hgrn2-10m: b},
       columns: {loss: params_total}}
"""
BOOKS = "books: {about: some books, files: ['*.txt'], sha256: {one.txt: '00'}}\n"


def make_items(folder: Path) -> Library:
    """Writes two items, and the text that one trains on, and reads them."""
    text = folder / "text.txt"
    paper = folder / "items" / "900"
    paper.mkdir(parents=True)
    text.write_text("".join(f"{n} is followed by {n + 1}. " for n in range(2000)))
    (paper / "paper.yaml").write_text(PAPER)
    (paper / "table1.yaml").write_text(TRAIN.replace("TEXT", str(text)))
    (paper / "table2.yaml").write_text(DATA)
    (folder / "items" / "data.yaml").write_text(BOOKS)
    return read_library(folder / "items", strict=True)

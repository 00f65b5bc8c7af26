"""Files of runs in other forms, runs left out, sweeps, units, and tables of a million rows."""

import gzip
import json
import re

import numpy as np
import pytest

from linnet.config import ConfigError
from linnet.laws.fit import fit_study, load_table


def written(path, rows: list[dict]) -> None:
    lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
    text = "\n".join(lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def runs(**extra) -> list[dict]:
    return [
        {"run_name": f"r{i}", "params": 1e7 * (1 + i % 4), "tokens": 1e9 * (1 + i // 4), "loss": 3 - 0.01 * i} | extra
        for i in range(8)
    ]


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz", "runs.csv.gz", "runs.csv"])
def test_formats_give_the_same_table(tmp_path, name):
    path = tmp_path / name
    if "jsonl" in name:
        text = "\n".join(json.dumps(row) for row in runs())
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    else:
        written(path, runs())
    table, _ = load_table(path)
    assert list(table["run"]) == [f"r{i}" for i in range(8)] and table["loss"].iloc[3] == pytest.approx(2.97)
    assert table.attrs["columns"] == {"N": "params", "D": "tokens", "loss": "loss", "run": "run_name"}
    assert table["line"].iloc[0] == (1 if "jsonl" in name else 2)


def test_a_number_at_the_end_of_a_file_without_a_line_end_is_noted(tmp_path, monkeypatch):
    """It may be cut off; but spreadsheets leave the line end out, so the row counts."""
    path = tmp_path / "runs.csv"
    written(path, runs())
    whole = path.read_text()
    for large in (2**20, 1):
        monkeypatch.setattr("linnet.laws.fit.reading.LARGE", large)
        path.write_text(whole[:-1])
        table, notes = load_table(path)
        assert table["loss"].iloc[-1] == 2.9 and [
            note for note in notes if "line 9: the last line has no line end" in note
        ]
        for ended in (whole + "\n", whole.replace(",loss", ",loss,name").replace("\n", ",a\n", 8) + ",a"):
            path.write_text(ended.replace("name,a", "name"))
            assert not [note for note in load_table(path)[1] if "line end" in note], ended


@pytest.mark.parametrize(
    "name, content, word",
    [
        ("a.jsonl", b'{"N": 1}\n[1]\nx\n', "line 2.*line 3"),
        ("a.csv.gz", b"\x1f\x8b123", "gzip"),
        ("a.csv", b"N,C,loss\n1,2," + b"9" * (2**17 + 1), "not a number|infinite"),
        ("a.csv", b'N,C,loss\n1,2,"' + b"9" * (17 * 2**20), "quote"),
    ],
)
def test_bad_files_give_messages(tmp_path, name, content, word):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_table(path)
    assert re.search(word, "; ".join(error.value.problems), re.DOTALL)


def test_a_table_that_grows_when_it_is_unpacked_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("linnet.laws.fit.reading.MOST_TEXT", 10_000)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"N,C,loss\n" + b"1,2,3\n" * 10_000))
    with pytest.raises(ConfigError, match="more than 10,000 bytes"):
        load_table(tmp_path / "a.csv.gz")


def test_runs_are_left_out_by_column_and_by_request(tmp_path):
    rows = runs(exclude="")
    rows[0] |= {"exclude": "diverged", "loss": "nan"}
    rows[1] |= {"exclude": "no"}
    rows[2] |= {"exclude": "yes"}
    path = tmp_path / "runs.csv"
    written(path, rows)
    table, _ = load_table(path, exclude=["run_name=r3"])
    assert list(table["run"]) == ["r1", "r4", "r5", "r6", "r7"]
    reasons = {row["run"]: row["reason"] for row in table.attrs["excluded"]}
    assert reasons == {"r0": "column exclude: diverged", "r2": "column exclude", "r3": "--exclude run_name=r3"}
    study = fit_study(table, method="power", bootstrap=0)
    assert [row["run"] for row in study.excluded] == ["r0", "r2", "r3"]
    for bad in ("run=rr", "nothing=1", "run"):
        with pytest.raises(ConfigError, match=bad):
            load_table(path, exclude=[bad])


def sweep(tmp_path, factor=0.02, **columns):
    rows = [row | columns | {"loss": row["loss"] * (1 + factor * k)} for row in runs() for k in range(3)]
    for k, row in enumerate(rows):
        row["run_name"] = f"{row['run_name']}-{k % 3}"
        if "lr" in row:
            row["lr"] = 1e-3 * 2 ** (k % 3)
    path = tmp_path / "sweep.csv"
    written(path, rows)
    return path


def test_a_sweep_is_no_ladder(tmp_path):
    path = sweep(tmp_path)
    with pytest.raises(ConfigError, match="best-of"):
        load_table(path)
    table, notes = load_table(path, best_of=True)
    assert list(table["run"]) == [f"r{i}-{3 * i % 3}" for i in range(8)] and "16 rows left out" in notes[-1]


def test_repeats_are_kept_and_small_sweeps_are_noticed(tmp_path):
    assert len(load_table(sweep(tmp_path, 0.005))[0]) == 24
    with pytest.raises(ConfigError, match="learning_rate differs"):
        load_table(sweep(tmp_path, 0.005, lr=0))


def test_runs_of_other_seeds_are_repeats_however_far_apart(tmp_path):
    path = tmp_path / "seeds.csv"
    rows = [row | {"seed": 0} for row in runs()]
    written(path, [*rows, rows[0] | {"seed": 1, "loss": 1.2 * rows[0]["loss"], "run_name": "again"}])
    assert len(load_table(path)[0]) == 9
    written(path, [*rows, rows[0] | {"loss": 1.2 * rows[0]["loss"], "run_name": "again"}])
    with pytest.raises(ConfigError, match="more than repeats do"):
        load_table(path)


def test_losses_in_bits(tmp_path):
    path = tmp_path / "bits.csv"
    written(path, [{("bits_per_byte" if k == "loss" else k): v for k, v in row.items()} for row in runs()])
    columns = {"loss": "bits_per_byte"}
    with pytest.raises(ConfigError, match="loss-unit bits"):
        load_table(path, columns)
    table, notes = load_table(path, columns, loss_unit="bits")
    assert table["loss"].iloc[0] == pytest.approx(3 * np.log(2)) and "ln 2" in notes[-1]
    written(path, [row | {"loss": row["loss"] / 10} for row in runs()])
    with pytest.raises(ConfigError, match="entropy"):
        load_table(path)
    assert len(load_table(path, loss_unit="any")[0]) == 8


def test_one_column_is_not_two_things(tmp_path):
    path = tmp_path / "runs.csv"
    written(path, runs())
    with pytest.raises(ConfigError, match="params.*N already"):
        load_table(path, {"N": "params", "D": "params"})


def test_budgets_that_match_nothing_are_named(surface):
    table = surface.ladder(np.geomspace(1e18, 1e20, 3))
    with pytest.raises(ConfigError, match=r"1e\+25 matches no row"):
        fit_study(table, method="isoflop", bootstrap=0, budgets=[1e18, 1e25])


def test_long_curves_are_thinned(tmp_path):
    D = np.geomspace(1e8, 1e10, 6000)
    path = tmp_path / "curves.csv"
    sizes = {f"r{r}": 1e7 * 2**r for r in range(4)}
    lines = [f"{run},{N},{d:.6g},{1.7 + 400 / N**0.34 + 2000 / d**0.37:.6g}" for run, N in sizes.items() for d in D]
    path.write_text("run,N,D,loss\n" + "\n".join(lines))
    table, notes = load_table(path)
    assert 1900 <= len(table) <= 2100 and "24,000 rows" in notes[-1]
    assert (table.groupby("run")["D"].max() == 1e10).all()


PLAIN = "run,model,N,D,loss\n" + "".join(f"r{i},tnl,{1e7 * (1 + i)},{1e9 + i},{3 - 0.01 * i}\n" for i in range(8))


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.rstrip("\n") + "\n\n",
        PLAIN.replace(",", "\t"),
        PLAIN.replace(",", ";").replace("tnl", "a, b"),
        PLAIN.replace(",tnl", ', "tnl" '),
        PLAIN.replace("r3,", "\n,,,,\n r3,"),
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("r3,", "r3,,"),
        PLAIN.replace("r3,", ""),
        PLAIN.replace("model", "run"),
        PLAIN.replace("2.97", "x"),
        PLAIN.splitlines()[0],
    ],
)
def test_large_texts_are_read_as_small_ones(tmp_path, monkeypatch, text):
    path = tmp_path / "runs.csv"
    path.write_bytes(text.encode())

    def read():
        try:
            table, notes = load_table(path)
        except ConfigError as error:
            return error.problems
        return table.to_csv(), notes

    small = read()
    monkeypatch.setattr("linnet.laws.fit.reading.LARGE", 0)
    assert read() == small


@pytest.mark.parametrize("bad, last", [(12, "line 12: not JSON"), (13, "and 1 more problems")])
def test_bad_lines_beyond_the_first_are_counted(tmp_path, bad, last):
    (tmp_path / "runs.jsonl").write_text("oops\n" * bad)
    with pytest.raises(ConfigError) as error:
        load_table(tmp_path / "runs.jsonl")
    assert error.value.problems[-1].startswith(last)

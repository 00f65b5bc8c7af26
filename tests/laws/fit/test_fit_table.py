import json
import math
import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linnet.config import ConfigError
from linnet.laws.fit import (
    apply_convention,
    assign_budgets,
    curves_of,
    filter_table,
    fit_study,
    load_table,
    parse_columns,
)
from linnet.laws.fit.table import load_points
from linnet.laws.further import fit_laws
from linnet.study.collect import load_study

HEADER = "run,architecture,N,D,C,loss\n"
GOOD = HEADER + "a,tnl,1e6,2e7,1.2e14,3.5\nb,tnl,2e6,2e7,2.4e14,3.2\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="runs.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def problems_of(path, columns=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_table(path, columns)
    return caught.value.problems


def test_reads_a_table(write):
    table, notes = load_table(write(GOOD))
    assert table["N"].tolist() == [1e6, 2e6] and table["line"].tolist() == [2, 3] and notes == []
    assert table["N_total"].isna().all() and table["architecture"].tolist() == ["tnl", "tnl"]


@pytest.mark.parametrize(
    "text", [GOOD.replace(",", ";"), GOOD.replace(",", "\t"), "\ufeff" + GOOD, GOOD + "\n\n,,,,,\n"]
)
def test_other_separators_byte_order_mark_and_blank_lines(write, text):
    assert load_table(write(text))[0]["loss"].tolist() == [3.5, 3.2]


def test_usual_names_are_found_and_others_can_be_named(write):
    text = "Model Size,Training FLOP,final loss,x\n1e9,6e20,2.5,1\n2e9,6e21,2.3,2\n"
    table, notes = load_table(write(text))
    assert table["D"].tolist() == [1e11, 5e11] and notes == ["no column of tokens: D = C / (6 N)"]
    assert table["architecture"].tolist() == ["runs", "runs"]
    assert table["run"].tolist() == ["N 1e+09, D 1e+11", "N 2e+09, D 5e+11"]
    again, _ = load_table(write("Model Size,Training FLOP,final loss\n2e9,6e21,2.3\n1e9,6e20,2.51\n1e9,6e20,2.5\n"))
    assert again["run"].tolist() == ["N 2e+09, D 5e+11", "N 1e+09, D 1e+11 (2)", "N 1e+09, D 1e+11"]
    table, notes = load_table(write("n,t,l\n1e9,1e11,2.5\n2e9,1e11,2.4\n"), {"N": "n", "D": "t", "loss": "l"})
    assert table["C"].tolist() == [6e20, 1.2e21] and notes == ["no column of FLOPs: C = 6 N D"]


def test_a_mapping_wins_over_a_column_of_that_name(write):
    table, _ = load_table(write("N,params,C,loss\n7,1e6,1e15,3\n8,2e6,1e15,3.1\n"), {"N": "params"})
    assert table["N"].tolist() == [1e6, 2e6]


def test_all_bad_cells_are_listed_with_their_lines(write):
    rows = ["a,tnl,1e6,2e7,1e14,3", "b,tnl,x,2e7,1e14,nan", "c,tnl,1e6,-5,0,2.9", "d,tnl,1e6,,inf,-1", "e,t,1,1,1,NaN"]
    found = problems_of(write(HEADER + "\n".join(rows)))
    expected = [
        "N: not a number.* line 3 .*'x'.*; correct it, or drop the row",
        "D: missing or NaN.* line 5",
        "D: .* positive in line 4 .*'-5'",
        "C: infinite in line 5 .*'inf'.*drop the row",
        "C: .* positive in line 4 .*'0'",
        "loss: missing or NaN.* lines 3, 6",
        "loss: .* positive in line 5 .*'-1'.*drop the row",
    ]
    assert len(found) == len(expected)
    assert all(re.match(words, line) for words, line in zip(expected, found, strict=True)), found


def test_bad_cells_of_metrics_and_of_further_laws_are_listed_too(write):
    text = "N,D,loss,value,chance,attention_share,seq_len\n1e6,2e7,3,x,nan,7,\n2e6,2e7,2.9,0.5,inf,,0.5\n"
    path = write(text)
    with pytest.raises(ConfigError) as error:
        load_points(path)
    expected = ["value: not a number in line 2 .*'x'", "chance: infinite in line 3 .*'inf'.*leave the cell empty"]
    assert [bool(re.match(*pair)) for pair in zip(expected, error.value.problems, strict=True)] == [True, True]
    with pytest.raises(ConfigError) as error:
        fit_laws(load_table(path)[0], ["gap"])
    expected = ["attention_share: not from 0 to 1 in line 2 .*'7'", "seq_len: not from 1 up in line 3 .*'0.5'"]
    assert [bool(re.match(*pair)) for pair in zip(expected, error.value.problems, strict=True)] == [True, True]


def test_duplicates_are_listed(write):
    rows = ["a,tnl,1e6,2e7,1e14,3", "b,tnl,1e6,2e7,1e14,3.1", "a,tnl,1000000,2e7,1e14,3.0", "a,hgrn2,1e6,2e7,1e14,3"]
    assert problems_of(write(HEADER + "\n".join(rows))) == ["the same row 2 times, in lines 2, 4; keep one"]


def test_missing_columns_name_the_nearest(write):
    path = write("paramz,tokenz,lss\n1,2,3\n")
    found = problems_of(path)
    assert len(found) == 3 and "no column for N" in found[0] and "--columns N=COLUMN" in found[0]
    assert "did you mean 'lss'" in found[1] and "no column for C (or D)" in found[2]
    found = problems_of(path, {"N": "params", "D": "tokenz", "loss": "lss"})
    assert found == ["N='params': the table has no such column; did you mean 'paramz'?"]
    assert "unknown name 'los'; did you mean 'loss'?" in problems_of(path, {"los": "lss"})[0]


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"N,C,loss\n", "rows"),
        (b"N,C,loss\n1,2\n", "line 2: "),
        (b"N,N,C,loss\n1,2,3,4\n", "'N'"),
        (b"N,C,loss\n1,\xff\xfe,3\n", "UTF-8"),
        (b"PK\0\0\0", "binary"),
    ],
)
def test_files_that_are_no_tables(write, content, words):
    assert words in problems_of(write(content))[0]


def test_missing_file_and_folder(tmp_path):
    assert "none.csv" in problems_of(tmp_path / "none.csv")[0]
    assert "a folder" in problems_of(tmp_path)[0]
    for folder, words in ((tmp_path, "linnet study"), (tmp_path / "none", "none")):
        with pytest.raises(ConfigError, match=words):
            load_study(folder)


def test_many_problems_are_cut(write):
    rows = [f"{n},tnl,1e6,2e7,1e14,3" for n in range(2)] * 1
    rows = [line for n in range(40) for line in (f"a,tnl,{n + 1}e6,2e7,1e14,3", f"a,tnl,{n + 1}e6,2e7,1e14,3")]
    found = problems_of(write(HEADER + "\n".join(rows)))
    assert len(found) == 31 and found[-1] == "and 10 more problems"


@settings(max_examples=60)
@given(text=st.text(alphabet="N,C loss\n1e6.-\"'\t;na\0é", max_size=60))
def test_any_text_gives_a_table_or_a_listed_problem(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "t.csv"
    path.write_text("N,C,loss\n" + text)
    try:
        table, _ = load_table(path)
    except ConfigError as error:
        assert error.problems
    else:
        assert len(table) and (table[["N", "C", "D", "loss"]] > 0).all(axis=None)


def test_diverged_runs_are_left_out_with_a_note(write):
    text = "run,N,C,loss,status\na,1e6,1e14,3,done\nb,2e6,1e14,nan,diverged\nc,3e6,1e14,3.1,\n"
    table, notes = load_table(write(text))
    assert table["run"].tolist() == ["a", "c"] and notes[0] == "1 row left out: diverged (line 3)"
    assert "no run is done" in problems_of(write("run,N,C,loss,status\nb,2e6,1e14,nan,diverged\n"))[0]


def test_parse_columns():
    assert parse_columns(["N=Model Size, C=FLOP", "loss=l"]) == {"N": "Model Size", "C": "FLOP", "loss": "l"}
    with pytest.raises(ConfigError) as caught:
        parse_columns(["N", "los=x", "C=a,C=b"])
    assert len(caught.value.problems) == 3 and "did you mean 'loss'?" in caught.value.problems[1]


def test_filters_count_what_they_drop(surface):
    table = surface.ladder([1e18, 1e20])
    kept, notes = filter_table(table, max_loss=table["loss"].quantile(0.8), min_tokens_per_param=5)
    assert len(kept) < len(table) and len(notes) == 2 and (kept["D"] / kept["N"] >= 5).all()
    with pytest.raises(ConfigError, match="row"):
        filter_table(table, max_loss=0.1)
    assert filter_table(table)[1] == []


def test_conventions(surface):
    table = surface.ladder([1e18])
    total = apply_convention(table, "total", "6nd")
    assert total["N"].tolist() == pytest.approx((1.1 * table["N"]).tolist())
    assert total["C"].tolist() == pytest.approx((1.1 * table["C"]).tolist())
    assert total["spent"].tolist() == table["C"].tolist()
    with pytest.raises(ConfigError, match="N_total"):
        apply_convention(table.assign(N_total=np.nan, line=2), "total", "exact")
    with pytest.raises(ValueError, match="non-embedding"):
        apply_convention(table, "all", "exact")


def test_budgets_by_name_by_column_and_by_clustering():
    C = np.array([0.97e18, 1.0e18, 1.04e18, 9.9e18, 10.2e18, 1e20, 3e18])
    table = pd.DataFrame({"C": C, "budget": np.nan})
    groups, nominal = assign_budgets(table, [1e19, 1e18])
    assert groups.tolist() == [0, 0, 0, 1, 1, -1, -1] and nominal == [1e18, 1e19]
    groups, nominal = assign_budgets(table)
    assert nominal is None and len(set(groups[:3])) == 1 and groups[3] == groups[4] and len(set(groups)) == 4
    groups, nominal = assign_budgets(table.assign(budget=[1, 1, 2, 2, 3, 3, 3.0]))
    assert groups.tolist() == [0, 0, 1, 1, 2, 2, 2] and nominal == [1, 2, 3]


def test_stragglers_beside_a_large_group_are_no_budget():
    C = np.concatenate([np.full(12, 1e18), [1.2e18, 1.21e18], np.full(12, 1e19)])
    groups, _ = assign_budgets(pd.DataFrame({"C": C}))
    assert (groups[12:14] == -1).all() and len(set(groups)) == 3


def test_study_folder_with_curves(tmp_path, surface):
    table = surface.ladder([1e18]).iloc[:3].assign(status="done", path=["runs/0", "runs/1", "runs/2"])
    table.to_csv(tmp_path / "table.csv", index=False)
    records = [
        {"step": s, "tokens": 10 * s, "flops": 100.0 * s, "loss": 5 / s, "learning_rate": 0.1} for s in (1, 2, 3)
    ]
    records.append({"step": 3, "tokens": 30, "flops": 300.0, "validation_loss": 2.0})
    lines = [json.dumps(record) for record in records] + [
        '{"step": 4, "tokens": 40, "flops": 400, "loss": NaN}',
        '{"st',
    ]
    for run in ("0", "2"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "metrics.jsonl").write_text("\n".join(lines))
    rows, curves, notes = load_study(tmp_path)
    assert len(rows) == 3 and len(curves) == 6
    assert curves["C"].tolist()[:3] == [100, 200, 300] and curves["run"].unique().tolist() == ["tnl-0", "tnl-2"]
    assert curves["N"].iloc[0] == pytest.approx(table["N"].iloc[0])
    assert "1 row without a training curve" in notes[0] and "2 unreadable lines" in notes[1]


def test_a_table_of_checkpoints_is_its_own_curves(surface):
    curves = surface.curves([1e8, 1e9], points=5)
    assert curves_of(curves) is curves and curves_of(surface.ladder([1e18])) is None


def test_filters_act_before_checks_of_repeats_and_units(write):
    text = HEADER + "a,tnl,1e6,2e7,1.2e14,3.5\nb,tnl,1e6,2e7,1.2e14,9\nc,tnl,2e6,2e7,2.4e14,40\n"
    table, notes = load_table(write(text), keep=lambda rows: filter_table(rows, max_loss=5))
    assert table["run"].tolist() == ["a"] and notes == ["2 rows left out: loss above 5"]


@pytest.mark.parametrize(
    "rows, words",
    [
        (["70e6,1.4e9,5.9e17,18.2"], ("loss: 18.2 nats", "perplexity", "--loss-unit perplexity")),
        (["70e6,1.4e9,0.00681,3"], ("C in PF-days", "--columns C=")),
        (["70,1.4e9,5.9e17,3"], ("N in millions",)),
        (["70e6,1.4,5.9e17,3"], ("D in billions",)),
        (["0.07,1.4,5.9e17,3"], ("D in billions", "line 2")),
        (["70e6,1.4e9,5.9e17,3", "70e6,2.8e9,11.8,2.9"], ("line 3",)),
    ],
)
def test_columns_in_other_units_are_refused_with_a_hint(write, rows, words):
    (problem,) = problems_of(write("N,D,C,loss\n" + "\n".join(rows)))
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("text", ["N,C,loss\n70e6,0.0068,3\n", "N,C,loss\n70,5.9e17,3\n", "N,D,loss\n70,1.4,3\n"])
def test_units_without_a_column_to_compare_with(write, text):
    assert "PF-days" in problems_of(write(text))[0]


def test_plausible_tables_are_not_refused(write):
    rows = ["1e6,70e6,1.4e9,3e16,11.9", "37e9,671e9,1.5e13,3.4e24,1.7", "1e6,5e9,1e9,6e18,3"]
    table, _ = load_table(write("N,N_total,D,C,loss\n" + "\n".join(rows)))
    assert len(table) == 3
    table, _ = load_table(write("N,D,C,flops_paper,loss\n1e5,1e9,9e16,9e16,3\n"))
    assert table["C"].tolist() == [9e16], "a study of long contexts"
    exact, _ = load_table(write("N,D,C,loss\n70e6,1.4e9,0.0068,3\n"), {"C": ""})
    assert exact["C"].tolist() == [6 * 70e6 * 1.4e9]


def test_compute_is_compared_with_6_n_d(write):
    """A tenth of 6 N D is the least that can be: 6e12 FLOPs for a million parameters and ten million tokens."""
    assert len(load_table(write("N,D,C,loss\n1e6,1e7,6.1e12,3\n"))[0]) == 1
    assert "C / (6 N D) is 0.098" in problems_of(write("N,D,C,loss\n1e6,1e7,5.9e12,3\n"))[0]


def test_perplexities_and_their_column(write):
    text = "N,D,eval/ppl\n70e6,1.4e9,20\n160e6,3.2e9,15\n"
    assert "perplexity" in problems_of(write(text), {"loss": "eval/ppl"})[0]
    table, notes = load_table(write(text), {"loss": "eval/ppl"}, loss_unit="perplexity")
    assert table["loss"].tolist() == pytest.approx(np.log([20, 15]))
    assert any("is a perplexity" in note for note in notes)


def test_exports_of_experiment_trackers_are_read(write):
    text = 'Name,State,Runtime,_step,Peak LR,num_params,tokens_seen,val/loss\n"a",finished,9,1,1e-3,70e6,1.4e9,3.5\n'
    text += "b,crashed,9,1,1e-3,160e6,,\nc,running,9,1,2e-3,160e6,3.2e9,6\nd,Finished,9,1,2e-3,160e6,3.2e9,3.1\n"
    table, notes = load_table(write(text))
    assert table["run"].tolist() == ["a", "d"] and table["learning_rate"].tolist() == ["1e-3", "2e-3"]
    assert any("crashed" in note for note in notes)
    sizes, _ = load_table(write("state,N,D,loss\n4096,70e6,1.4e9,3.5\n8192,160e6,3.2e9,3.1\n"))
    assert len(sizes) == 2, "a column `state` may have sizes"


@pytest.mark.parametrize("name", ["runs.json", "runs.csv", "runs.jsonl"])
def test_an_array_of_objects_is_a_table(write, name):
    rows = [{"N": 70e6, "D": 1.4e9, "loss": 3.5, "lr": None}, {"N": 160e6, "D": 3.2e9, "loss": 3.1}]
    table, _ = load_table(write(json.dumps(rows, indent=1), name))
    assert table["loss"].tolist() == [3.5, 3.1] and table["line"].tolist() == [1, 2]
    assert "line 2: not a JSON object" in problems_of(write(json.dumps([rows[0], 3]), name))[0]
    assert "not a JSON array" in problems_of(write("[{", name))[0]
    assert problems_of(write("[]", name))


@pytest.mark.parametrize(
    "labels, expected",
    [
        (["70m", "160m", "1.4b"], ["runs"] * 3),
        (["pythia-70M", "Pythia-160M".lower(), "pythia-1.4B"], ["pythia"] * 3),
        (["gpt2", "gpt2-medium", "gpt2-xl"], ["gpt2"] * 3),
        (["small", "base", "large"], ["runs"] * 3),
        (["512", "768", "1024"], ["runs"] * 3),
        (["mamba-130m", "mamba-370m", "llama 370M"], ["mamba", "mamba", "llama"]),
        (["llama-2-7b", "llama-3-8b", "llama-3-70b"], ["llama-2", "llama-3", "llama-3"]),
        (["tnl", "hgrn2", "llama"], ["tnl", "hgrn2", "llama"]),
        (["tnl-small", "hgrn2-base", "llama-large"], ["tnl-small", "hgrn2-base", "llama-large"]),
    ],
)
def test_labels_of_one_size_each_are_sizes(write, labels, expected):
    rows = [
        f"{label},{N}e6,{D}e9,{3 + 1 / N}" for label, N in zip(labels, (70, 160, 1400), strict=True) for D in (1, 2)
    ]
    path = write("model,N,D,loss\n" + "\n".join(rows))
    table, notes = load_table(path)
    assert table["architecture"].tolist()[::2] == expected
    assert any("are sizes of" in note for note in notes) == (expected != labels)
    assert set(load_table(path, {"architecture": "model"})[0]["architecture"]) == set(labels)
    assert set(load_table(path, {"architecture": ""})[0]["architecture"]) == {"runs"}


def test_labels_with_several_sizes_are_architectures(write):
    text = "model,N,D,loss\nbase,70e6,1e9,3.5\nbase,160e6,1e9,3.3\nlarge,70e6,1e9,3.4\nlarge,160e6,1e9,3.2\n"
    assert set(load_table(write(text))[0]["architecture"]) == {"base", "large"}


def test_a_column_can_be_switched_off():
    assert parse_columns(["architecture=", "loss=l"]) == {"architecture": "", "loss": "l"}


def test_seeds_of_one_point_are_no_different_points(write):
    rows = ["N,D,loss,seed,unique_tokens,batch_tokens"]
    rows += [f"{N},1.4e9,{loss},{seed},1e6,128" for N in ("70e6", "160e6") for seed, loss in enumerate((3.5, 3.2, 3.4))]
    table, notes = load_table(write("\n".join(rows) + "\n"))
    assert len(table) == 6 and not any("--best-of" in note for note in notes)


@pytest.mark.parametrize("column", ["unique_tokens", "batch_tokens"])
def test_the_columns_of_laws_are_part_of_a_point(write, column):
    text = f"N,D,loss,{column}\n70e6,1.4e9,3.5,1e6\n70e6,1.4e9,3.2,1e8\n160e6,1.4e9,3.1,1e6\n"
    table, notes = load_table(write(text))
    assert len(table) == 3 and "differ by up to 9.4%; --best-of" in notes[-1]
    assert len(load_table(write(text + "160e6,1.4e9,3.1,1e8\n"))[0]) == 4
    assert load_table(write(text), best_of=True)[0]["loss"].tolist() == [3.2, 3.1]
    assert len(load_table(write(text), best_of=True, point=[column])[0]) == 3
    assert "differ by" in problems_of(write(text + "70e6,1.4e9,3,1e8\n"))[0]


def test_a_sweep_under_one_name_is_not_a_training_curve(write):
    rows = [
        f"sweep,tnl,{N},{C / 6 / N},{C},{loss}"
        for N in (1e6, 2e6, 4e6)
        for C in (1e14, 3e14, 1e15, 3e15)
        for loss in (3.5, 3.7)
    ]
    assert "--best-of" in problems_of(write(HEADER + "\n".join(rows)))[0]
    rows = [f"sweep,tnl,{N},{2e7},{1.2e8 * N},{1e1 * N**-0.1}" for N in np.geomspace(1e6, 1e8, 8)]
    table, _ = load_table(write(HEADER + "\n".join(rows)))
    assert curves_of(table) is None and table["run"].nunique() == 8


def test_two_architectures_may_have_runs_of_one_name(write):
    rows = [
        f"{name},{N},{D},{6 * N * D},{6 * N * D * ratio},{1.7 + 400 / N**0.34 + 400 / D**0.28},size{N}"
        for name, ratio in (("a", 2), ("b", 1))
        for N in (1e6, 2e6, 4e6, 8e6)
        for D in np.geomspace(1e7, 1e9, 12)
    ]
    table, _ = load_table(write("architecture,N,D,C,flops_paper,loss,run\n" + "\n".join(rows)))
    found = fit_study(table, method="envelope", flops="paper", bootstrap=0, conventions=False)
    assert found["a"].L.c_max == pytest.approx(2 * found["b"].L.c_max)


def test_budgets_in_another_unit_are_refused(write):
    rows = [f"{i},tnl,{1e6 * i},2e7,{1.2e14 * i},3.5,{i}" for i in (1, 2, 3)]
    (problem,) = problems_of(write(HEADER.replace("loss", "loss,budget") + "\n".join(rows)))
    assert problem.startswith("budget (budget): 1 in lines 2, 3, 4") and "--columns budget=" in problem


@pytest.mark.parametrize(
    "column, cells, columns, told",
    [
        ("tokenizer", ("byte", "bpe"), None, "the rows have 2 tokenizers, bpe, byte"),
        ("tokenizer", ("byte", "byte"), None, None),
        ("bits_per_byte", (3.0, 1.0), None, "a token has 1 to 3 bytes"),
        ("bits_per_byte", (3.0, 2.95), None, None),  # other held-out windows
        ("bits_per_byte", (3.0, 1.0), {"loss": "bits_per_byte"}, None),  # these compare
    ],
)
def test_losses_per_token_of_other_tokens_are_told(tmp_path, column, cells, columns, told):
    nats = 3 * math.log(2)
    rows = [f"{name},{n},1e9,{nats},{cell}" for name, cell in zip("ab", cells, strict=True) for n in (1e6, 2e6)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join([f"architecture,N,D,loss,{column}", *rows]) + "\n")
    _, notes = load_table(path, columns, loss_unit="bits" if columns else None)
    found = [note for note in notes if "losses per token do not compare" in note]
    assert bool(found) == bool(told) and (not told or told in found[0])

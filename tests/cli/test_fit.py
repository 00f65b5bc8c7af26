import json
import re
import time
import warnings

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from linnet.cli import app
from linnet.cli.fit import CHOICES


def run(*arguments):
    return CliRunner().invoke(app, ["fit", *map(str, arguments)], env={"COLUMNS": "100"})


@pytest.fixture
def table(tmp_path):
    """Two architectures, four budgets, seven sizes; parabolas with their optimum inside for one of them only."""
    lines = ["run,architecture,budget,params_non_embedding,params_total,tokens,flops,loss"]
    for name, shift in (("tnl", 1.0), ("hgrn2", 30.0)):
        for C in np.geomspace(1e18, 1e21, 4):
            for N in C**0.5 * np.geomspace(0.3, 3, 7):
                loss = 20 * C**-0.05 + 0.3 * np.log10(N / (shift * C**0.5)) ** 2
                lines.append(f"{name}-{len(lines)},{name},{C},{N},{1.2 * N},{C / 6 / N},{C},{loss}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join([*lines, ""]))
    return path


def test_the_help_names_all_choices():
    parameters = typer.main.get_command(app).commands["fit"].params
    shown = {parameter.opts[0].removeprefix("--"): parameter for parameter in parameters}
    for name, values in CHOICES.items():  # many would fold as a metavar, so the text has them
        words = re.findall(r"\w+", shown[name].help)
        assert shown[name].metavar == "|".join(values) or set(values) <= set(words), name


def test_json_by_architecture(table):
    result = run(table, "--bootstrap", 30, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    tnl = found["architectures"]["tnl"]["methods"]["isoflop"]
    assert tnl["parameters"]["a"] == pytest.approx(0.5, abs=1e-6) and len(tnl["intervals"]["b"]) == 2
    assert found["architectures"]["hgrn2"]["methods"]["isoflop"]["N_opt"]["refused"]
    assert "alpha" in found["architectures"]["hgrn2"]["methods"]["isoflop"]["parameters"]
    pair = found["crossings"][0]
    assert (pair["first"], pair["second"]) == ("hgrn2", "tnl"), "by name, whatever the losses"


def test_console_shows_laws_and_refusals(table):
    result = run(table, "--bootstrap", 30, "--method", "isoflop")
    assert result.exit_code == 0, result.output
    assert "N_opt = 1 C^0.5000" in result.output and "a + b = 1.000" in result.output
    assert "Refused" in result.output and "train larger models here" in result.output
    assert "1.000e+18" in result.output and "inside" in result.output
    ways = next(line.split() for line in result.output.splitlines() if line.startswith("tnl") and " a " in line)
    assert ways[2] == ways[-1] == ways[-2] == "0.5000", "as fitted, by cubics and by Akima interpolation"
    days = run(table, "--bootstrap", 0, "--method", "isoflop", "--unit", "pf-days")
    assert "PF-days" in days.output and "N_opt = 9.295e+09 C^0.5000" in days.output


def test_a_ratio_of_costs_that_does_not_change_is_one_number(tmp_path):
    lines = ["run,architecture,params_non_embedding,tokens,flops,loss"]
    for C in np.geomspace(1e18, 1e21, 4):
        for N in C**0.5 * np.geomspace(0.1, 1, 7):
            D = C / 9 / N
            lines.append(f"{len(lines)},a,{N},{D},{C},{1.7 + 400 * N**-0.34 + 400 * D**-0.34}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    output = run(tmp_path / "table.csv", "--bootstrap", 0, "--method", "parametric").output
    assert "6 N_opt D_opt / C is 0.67 between 1e+18 and 1e+21 FLOPs" in output


def test_it_ends_with_what_may_be_concluded_whatever_the_order_of_the_rows(table):
    shown = run(table, "--bootstrap", 30, "--method", "isoflop")
    _, _, lines = shown.output.partition("\nWhat you may conclude\n")
    found = json.loads(run(table, "--bootstrap", 30, "--method", "isoflop", "--json").stdout)
    assert lines.splitlines() == found["conclusions"] != []
    assert "the losses of hgrn2 and tnl cannot be told apart" in lines and found["orders"]["L"] == []
    head, *rows = table.read_text().splitlines()
    shuffled = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    table.write_text("\n".join([head, *shuffled, ""]))
    assert json.loads(run(table, "--bootstrap", 30, "--method", "isoflop", "--json").stdout) == found
    texts = []
    for lines in (rows, shuffled):
        table.write_text("\n".join(line.partition(",")[2] for line in (head, *lines)) + "\n")  # no column of runs
        texts.append(run(table, "--bootstrap", 30, "--json").stdout)
    assert texts[0] == texts[1]


def test_equal_losses_are_not_ranked_and_their_errors_are_zero(tmp_path):
    rows = [f"{name},{N},{C / 6 / N},2.5" for name in "ab" for C in (1e18, 1e19, 1e20) for N in (1e8, 2e8, 4e8, 8e8)]
    (tmp_path / "equal.csv").write_text("\n".join(["architecture,N,D,loss", *rows]))
    lines = json.loads(run(tmp_path / "equal.csv", "--bootstrap", 30, "--json").stdout)["conclusions"]
    assert "cannot be told apart (there are no intervals): the lowest that each has is 2.5000 nats" in lines[0]
    assert any("largest by 0\N{NO-BREAK SPACE}%" in line for line in lines) and all(
        line == line.strip() for line in lines
    )


def test_study_folder(table):
    result = run(table.parent, "--bootstrap", 0)
    assert result.exit_code == 0, result.output
    assert "28 rows without a training curve" in result.output or "56 rows without" in result.output


def test_total_parameters_and_6nd(table):
    plain, total = (
        json.loads(run(table, "--bootstrap", 0, "--json", "--method", "isoflop", *extra).stdout)
        for extra in ((), ("--count", "total", "--flops", "6nd"))
    )
    k_N = [found["architectures"]["tnl"]["methods"]["isoflop"]["parameters"]["k_N"] for found in (plain, total)]
    assert total["count"] == "total" and k_N[1] == pytest.approx(1.2 * k_N[0] / 1.2**0.5, rel=1e-6)


def test_the_window_and_the_ends_of_the_envelope(tmp_path):
    lines = ["run,N,D,C,loss"]
    for i, N in enumerate(np.geomspace(1e8, 1e9, 6)):
        for D in np.geomspace(N, 300 * N, 40):
            lines.append(f"r{i},{N},{D},{6 * N * D},{1.7 + 400 / N**0.34 + 2000 / D**0.37}")
    path = tmp_path / "curves.csv"
    path.write_text("\n".join(lines))
    options = ["--bootstrap", 0, "--json", "--method", "envelope", "--envelope", "hull"]
    plain, kept = (json.loads(run(path, *options, *extra).stdout) for extra in ((), ("--keep-ends",)))
    points = [next(iter(found["architectures"].values()))["methods"]["envelope"]["N_opt"] for found in (plain, kept)]
    assert points[1]["points"] > points[0]["points"]
    assert "--window 'most'" in run(path, "--window", "most").output


def test_all_bad_options_are_listed(table):
    options = [
        "--method",
        "isoflp",
        "--count",
        "x",
        "--bootstrap",
        -1,
        "--budgets",
        "1e18,x",
        "--hold-out",
        "nan",
        "--max-loss",
        "nan",
    ]
    result = run(table, *options, "--smooth", 2)
    assert result.exit_code == 2
    assert "7 problems" in result.output and "'isoflop'" in result.output


def test_bad_table_is_listed(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("N,C,loss\n1e6,1e15,nan\n-1,1e15,3\n1e6,1e16,2.5\n1e6,1e16,2.5\n")
    result = run(path)
    assert result.exit_code == 2 and "2 problems" in result.output and "line 2" in result.output
    assert "none.csv" in run(tmp_path / "none.csv").output


@pytest.fixture
def points(tmp_path):
    """Checkpoints of seven runs with a share of right answers that follows the loss."""
    lines = ["run,N,D,loss,task,acc,chance,questions"]
    for i, C in enumerate(np.geomspace(1e18, 1e21, 7)):
        for share in (0.3, 0.6, 1.0):
            loss = 1.7 + 1000 * (share * C) ** -0.15
            right = 0.25 + 0.75 / (1 + np.exp(3 * (loss - 2.6)))
            lines.append(f"r{i},{C**0.5},{share * C**0.5 / 6},{loss},arc,{right},0.25,2000")
    path = tmp_path / "points.csv"
    path.write_text("\n".join(lines))
    return path


def test_downstream(points, tmp_path):
    result = run(points, "--downstream", "--bootstrap", 30)
    assert result.exit_code == 0, result.output
    assert "arc = 0.25 + 0.75 / (1 + exp(3 (L - 2.6)))" in result.output and "L = 1.7 + " in result.output
    found = json.loads(run(points, "--downstream", "--bootstrap", 0, "--json").stdout)
    assert found["tasks"]["arc"]["points"]["transfer"]["parameters"]["midpoint"] == pytest.approx(2.6, abs=1e-3)
    page = run(points, "--downstream", "--bootstrap", 0, "--out", tmp_path / "page.html")
    assert page.exit_code == 0 and "From compute to metrics" in (tmp_path / "page.html").read_text()
    percent = run(points, "--downstream", "--columns", "value=questions")
    assert percent.exit_code == 2 and "divide percentages" in percent.output
    assert run(points, "--chance", 0.25).exit_code == 2


def test_terminal_names_columns_candidates_and_runs_left_out(table):
    result = run(table, "--bootstrap", 30, "--exclude", "run=tnl-1")
    assert result.exit_code == 0, result.output
    assert "N is column params_non_embedding (without embeddings), C is column flops" in " ".join(result.output.split())
    assert "Held-out errors" in result.output and "headline" in result.output
    assert "Runs left out" in result.output and "tnl-1 of tnl, loss" in result.output
    unknown = run(table, "--exclude", "run=absent", "--budgets", "1e30")
    assert unknown.exit_code == 2 and "absent" in unknown.output


def test_help_reads_well():
    result = run("--help")
    assert result.exit_code == 0 and "linnet fit studies/demo" in result.output and "95 %" in result.output


def test_chinchilla_within_the_bar(real_data):
    path = real_data / "chinchilla" / "svg_extracted_data.csv"
    if not path.is_file():
        pytest.skip(f"no Chinchilla points at {path}")
    columns = "N=Model Size,C=Training FLOP,loss=loss"
    start = time.process_time()  # however busy the machine is
    result = run(path, "--columns", columns, "--max-loss", 3.42, "--method", "parametric", "--bootstrap", 200, "--json")
    assert result.exit_code == 0, result.output
    assert time.process_time() - start < 120
    found = json.loads(result.stdout)
    truth = {"E": (1.817218, 5e-4), "A": (477.826, 1), "B": (2143.417, 5), "alpha": (0.34731, 2e-4)}
    for name, (value, tolerance) in {**truth, "beta": (0.367172, 2e-4), "a": (0.5139, 1e-4)}.items():
        assert found["parameters"][name] == pytest.approx(value, abs=tolerance)
        assert found["intervals"][name][0] < value < found["intervals"][name][1]
    assert any(note.startswith("5 rows ") and "3.42" in note for note in found["notes"])


def test_laws_as_text_and_as_json(table):
    shown = run(table, "--law", "all", "--bootstrap", 30)
    assert shown.exit_code == 0, shown.output
    assert "gap(delta) = exp" in shown.output and "Not supported by this table" in shown.output
    assert "state: no column state_fixed" in shown.output and "C as in the table" in shown.output
    found = json.loads(run(table, "--law", "gap", "--law", "batch", "--bootstrap", 30, "--json").stdout)
    assert list(found["laws"]) == ["gap", "batch"] and found["flops"] == "exact"
    assert found["laws"]["gap"]["estimates"][0]["value"] > 0 and found["laws"]["batch"]["refused"]


def test_laws_of_a_study_compare_with_its_first_architecture(table):
    """As on its page, in whichever order the table has them."""
    header, *rows = [line.split(",") for line in table.read_text().splitlines() if "hgrn2" not in line]
    rows = [
        [name + row[0], name, *row[2:-1], float(row[-1]) * level]
        for name, level in (("a", 1), ("b", 0.99))
        for row in rows
    ]
    table.write_text("\n".join(",".join(map(str, row)) for row in [header, *rows]))
    for order in (["b", "a"], ["a", "b"]):
        (table.parent / "study.yaml").write_text(f"architectures: {order}\n")
        found = run(table.parent, "--law", "efficiency", "--bootstrap", 0, "--json")
        assert f"{order[1]} for the loss of {order[0]}" in found.stdout


def test_bad_options_of_laws_are_listed_together(table):
    result = run(table, "--law", "gapp", "--of", "bits", "--context", 0, "--method", "power")
    assert result.exit_code == 2
    for part in ("'gapp'", "did you mean 'gap'", "'bits'", "--context 0", "leave out --method"):
        assert part in result.output
    assert "--law state" in run(table, "--context", 8).output
    assert "not in the table" in run(table, "--law", "gap", "--architectures", "tnl,x").output
    assert "--reference 'x'" in run(table, "--law", "efficiency", "--reference", "x").output


@pytest.mark.parametrize(
    ("fitted", "options"),
    [
        (["--downstream"], ["--window=all", "--hold-out=0.3", "--count=total", "--law=gap", "--predict=N=1e9,D=1e10"]),
        (["--downstream"], ["--method=power", "--best-of", "--budgets=1e18", "--unit=pf-days", "--reference=tnl"]),
        (
            ["--law=gap"],
            ["--window=auto", "--envelope=hull", "--keep-ends", "--smooth=3", "--full-grid", "--out=a"],
        ),
        (["--law=joint"], ["--reference=tnl", "--budgets=1e18", "--of=loss", "--context=8", "--delta=1"]),
        (["--method=power"], ["--window=sizes", "--full-grid", "--envelope=minimum", "--reference=tnl", "--chance=0"]),
    ],
)
def test_an_option_that_would_change_nothing_is_refused_by_name(table, fitted, options):
    result = run(table, *fitted, *options)
    assert result.exit_code == 2
    for option in options:
        assert f"- {option.partition('=')[0]}: changes nothing of" in result.output


def test_only_some_architectures(table):
    found = json.loads(run(table, "--architectures", "tnl", "--bootstrap", 0, "--json", "--method", "isoflop").stdout)
    assert list(found["architectures"]) == ["tnl"]


def test_a_law_names_the_column_of_n_and_filters_act_first(tmp_path):
    path = tmp_path / "t.csv"
    rows = [f"{N},{D},{2 + 400 / N**0.3 + 500 / D**0.3}" for N in (1e7, 1e8, 1e9) for D in (1e9, 1e10, 1e11)]
    path.write_text("\n".join(["num_params,tokens,loss", *rows, "1e8,1e10,7.9", "1e8,1e10,90"]))
    shown = run(path, "--law", "over-training", "--max-loss", 7, "--bootstrap", 0)
    assert shown.exit_code == 0 and "N is column num_params" in " ".join(shown.output.split()), shown.output
    assert "2 rows left out: loss above 7" in shown.output.replace("\n", " ")
    assert "--max-loss" in run(path, "--law", "over-training").output


def test_one_evaluated_checkpoint_is_refused_without_a_warning(tmp_path):
    path = tmp_path / "points.csv"
    path.write_text("run,N,D,loss,avg_error\na,1e8,2e9,3,0.5\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(path, "--downstream", "--columns", "value=avg_error")
    assert result.exit_code == 0 and "1 point of different loss" in result.output, result.output


def test_objective_and_delta_belong_to_the_surface_and_over_training(table):
    options = ("--method", "parametric", "--bootstrap", 0, "--json", "--architectures", "tnl")
    default, squares = (json.loads(run(table, *options, *more).stdout) for more in ((), ("--delta", "inf")))
    raw = json.loads(run(table, *options, "--objective", "raw", "--delta", "0.01").stdout)
    assert len({found["parameters"]["alpha"] for found in (default, squares, raw)}) == 3
    assert raw["architectures"]["tnl"]["methods"]["parametric"]["minimised"] == [0.01, True]
    assert "--delta 0" in run(table, "--delta", 0).output
    assert "--method parametric" in run(table, "--objective", "raw", "--method", "power").output
    assert "'rew'" in run(table, "--objective", "rew").output


def test_a_gap_of_architectures_of_other_compute_is_that_at_the_same_compute(tmp_path):
    lines = ["run,architecture,N,tokens,flops,loss"]
    for name, factor, low, high in (("far", 1.0, 1e18, 1e20), ("near", 1.03, 1e17, 1e19)):
        generator = np.random.default_rng(len(name))
        for C in np.geomspace(low, high, 5):
            for N in 0.09 * C**0.5 * np.geomspace(0.4, 2.5, 7):
                loss = factor * (1.69 + 406 / N**0.34 + 410 / (C / 6 / N) ** 0.28) * (1 + 1e-3 * generator.normal())
                lines.append(f"{name}{len(lines)},{name},{N},{C / 6 / N},{C},{loss}")
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines))
    result = run(path, "--bootstrap", 100, "--method", "isoflop", "--json")
    sentence = json.loads(result.stdout)["conclusions"][0]
    percent = re.search(r"near \(\+([\d.]+)\s%\) is higher at 10¹⁹\sFLOPs, by the laws", sentence)
    assert percent is not None and float(percent[1]) == pytest.approx(3.0, abs=0.5), sentence

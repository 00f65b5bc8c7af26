"""Fits scaling laws L(C), N_opt(C) and D_opt(C) to a table of runs, by four methods and with intervals.

Needs only NumPy, SciPy and pandas (the extra `study`), not torch.

    table, notes = load_table("runs.csv", columns={...})    `linnet.study.collect.load_study` reads a study folder
    curves = curves_of(table)
    study = fit_study(table, curves)            -> StudyFit, a mapping from architecture to ArchitectureFit
    fit = study["tnl"]
    fit.headline                                "isoflop": the method shown in summaries, for all architectures
    fit.L, fit.L_irreducible, fit.N_opt, fit.D_opt    laws of that method (Law): .coefficient .exponent .constant
                                                .intervals .band .held_out .refused .text() .predict(C) .interval_at(C)
    fit.isoflop.groups                          IsoflopGroup: .C .N .loss .parabola .N_opt .L_opt .inside .refused
    fit.envelope.points                         [{"C", "loss", "N", "D", "run", "inside"}], .mode .hull_size
    fit.sizes                                   the method of N_opt and D_opt, chosen apart: .a_plus_b .cost_ratio
    fit.parametric.surface                      {"E", "A", "B", "alpha", "beta"}, .surface_intervals .objective
    fit.conventions                             exponents with and without embeddings, exact FLOPs and 6ND
    predictions(study, [(N, D)])                losses of the surfaces at N and D, with intervals
    study.crossings                             where the laws of two architectures meet
    study.to_json()                             all results as plain values

    fit_downstream(points, chance=0.25)         -> Downstream: compute to loss to a metric, .law .transfer .predict(C)

If the table does not support a law, its `refused` lists the reasons and its numbers are None. `fit.refused` lists the
reasons of all laws of an architecture.
"""

from linnet.laws.fit.downstream import Downstream, Transfer, fit_downstream
from linnet.laws.fit.envelope import fit_envelope, fit_frontier
from linnet.laws.fit.isoflop import fit_groups, fit_isoflop
from linnet.laws.fit.law import PF_DAY, HeldOut, Law, draw_counts
from linnet.laws.fit.parametric import fit_parametric
from linnet.laws.fit.power import fit_power
from linnet.laws.fit.results import (
    ArchitectureFit,
    Bootstrap,
    Convention,
    Crossing,
    EnvelopeFit,
    IsoflopFit,
    IsoflopGroup,
    MethodFit,
    ParametricFit,
    PowerFit,
    StudyFit,
)
from linnet.laws.fit.study import METHODS, crossing, fit_study, parse_points, predictions
from linnet.laws.fit.table import (
    apply_convention,
    assign_budgets,
    curves_of,
    filter_table,
    load_table,
    parse_columns,
)

__all__ = [
    "ArchitectureFit",
    "Bootstrap",
    "Convention",
    "Crossing",
    "Downstream",
    "EnvelopeFit",
    "HeldOut",
    "IsoflopFit",
    "IsoflopGroup",
    "Law",
    "METHODS",
    "MethodFit",
    "PF_DAY",
    "ParametricFit",
    "PowerFit",
    "StudyFit",
    "Transfer",
    "apply_convention",
    "assign_budgets",
    "crossing",
    "curves_of",
    "draw_counts",
    "filter_table",
    "fit_downstream",
    "fit_envelope",
    "fit_frontier",
    "fit_groups",
    "fit_isoflop",
    "fit_parametric",
    "fit_power",
    "fit_study",
    "load_table",
    "parse_columns",
    "parse_points",
    "predictions",
]

"""Modules that moved are found under their old names, and say the new ones."""

import importlib
import inspect
import subprocess
import sys
import warnings

import pytest

import linnet.laws.fit.law
from linnet.deprecation import MOVED, RENAMED


@pytest.fixture(autouse=True)
def _forget_old_names():
    yield
    for old in sorted(MOVED, key=len, reverse=True):
        if sys.modules.pop(old, None) is not None:
            package, _, name = old.rpartition(".")
            vars(sys.modules[package]).pop(name, None)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_hides_nothing_has_the_names_of_the_new_ones_and_warns(old):
    """An import sets a module as an attribute of its package, which must not be a function of that name."""
    package, _, name = old.rpartition(".")
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # the package may be an old name too
        assert not hasattr(importlib.import_module(package), name)
    homes = [importlib.import_module(name) for name in MOVED[old][0]]
    with pytest.warns(FutureWarning, match=rf"{old} .*{homes[0].__name__}"):
        module = importlib.import_module(old)
    own = [name for name, value in vars(homes[0]).items() if not (name.startswith("_") or inspect.ismodule(value))]
    assert all(getattr(module, name) is getattr(homes[0], name) for name in own)


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_class_is_the_new_one_and_warns(old):
    (module, name), (home, new) = old.rpartition(".")[::2], RENAMED[old][0].rpartition(".")[::2]
    with pytest.warns(FutureWarning, match=rf"{old} .*{home}\.{new}"):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(home), new)


def test_a_name_that_left_its_module_is_still_there():
    with pytest.warns(FutureWarning):
        from linnet.study.fit import load_study, load_table
    assert load_study.__module__ == "linnet.study.collect" and load_table.__module__ == "linnet.laws.fit.table"


def test_a_module_inside_an_old_name_has_the_classes_of_the_new_one():
    with pytest.warns(FutureWarning, match=r"linnet\.laws\.fit\.law"):
        module = importlib.import_module("linnet.study.fit.law")
    assert module.Law is linnet.laws.fit.law.Law


def test_a_module_that_moved_twice_is_found_under_its_first_name():
    with pytest.warns(FutureWarning, match=r"linnet\.laws\.fit\.law"):
        module = importlib.import_module("linnet.study.fit.heldout")
    assert module.threshold is linnet.laws.fit.law.threshold


def test_what_was_never_there_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("linnet.study.nothing")
    with pytest.warns(FutureWarning), pytest.raises(ModuleNotFoundError):
        importlib.import_module("linnet.study.fit.nothing")
    with pytest.warns(FutureWarning), pytest.raises(ImportError):
        from linnet.study.fit import nothing  # noqa: F401


def test_laws_need_no_torch():
    code = "import sys, linnet.laws.fit, linnet.laws.further, linnet.laws.orders; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

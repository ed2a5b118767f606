"""Runs name the files of the examples from the root of the repository."""

import pytest
from studies.short_runs import ROOT


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)

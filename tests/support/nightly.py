"""Cases of a parametrised test that are left to scripts/nightly.sh."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def nightly(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.nightly)

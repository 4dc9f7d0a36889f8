"""Defects made by hand (``tests/mutants``): the table fits the code, and each week each test sees its defect."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.mutants import ROOT, SOURCE, Defect, defects, main, survives

ROWS = defects()


def test_the_table_fits_the_code() -> None:
    """Each text occurs once, and each test is there. A row whose code has gone is deleted or aimed anew."""
    faults = []
    for row in ROWS:
        if (count := (SOURCE / row.file).read_text().count(row.old)) != 1:
            faults.append(f"{row.id}: {row.file} has its text {count} times")
        for test in row.tests:
            path, _, name = test.partition("::")
            if not re.search(rf"^(async )?def {name.partition('[')[0]}\(", (ROOT / "tests" / path).read_text(), re.M):
                faults.append(f"{row.id}: there is no test {test}")
    assert not faults, "\n".join(faults)
    assert len({row.id for row in ROWS}) == len(ROWS)


def test_help() -> None:
    shown: list[str] = []
    assert main(["--help"], shown.append) == 0
    assert "python -m tests.mutants" in shown[0]


@pytest.mark.weekly
def test_tests_that_pass_have_missed_a_defect() -> None:
    """As they do without any; and those that are not there have not failed."""
    row = next(row for row in ROWS if row.id == "journal-order")
    assert " passes " in survives(replace(row, new=row.old))
    assert " cannot be run " in survives(replace(row, tests=("test_server_journal.py::test_nothing",)))
    assert not survives(row)


@pytest.mark.weekly
@pytest.mark.parametrize("defect", ROWS, ids=lambda row: row.id)
def test_each_defect_is_seen(defect: Defect) -> None:
    assert not (fault := survives(defect)), fault

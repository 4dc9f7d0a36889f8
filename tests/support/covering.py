"""Pairwise covering arrays: few rows in which every two levels of different factors meet at least once."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from itertools import combinations

Row = dict[str, str]
Level = tuple[str, str]
"""A factor and a level of it."""

Pair = frozenset[Level]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """All pairs of levels that meet in a row."""
    return {frozenset(two) for two in combinations(row.items(), 2)}


def all_pairs(factors: Mapping[str, Collection[str]], refused: Collection[Pair] = ()) -> set[Pair]:
    """All pairs of levels that may meet."""
    both = combinations(factors, 2)
    found = {frozenset({(one, a), (other, b)}) for one, other in both for a in factors[one] for b in factors[other]}
    return found - set(refused)


def covering_array(
    factors: Mapping[str, Mapping[str, str]], refused: Collection[Pair], seed: int = 0, tries: int = 12
) -> list[Row]:
    """Rows without a refused pair in which every other pair meets.

    Each row begins with a pair that no row has yet and takes the levels that add most pairs (the greedy algorithm of
    Cohen et al. 1997, "The AETG System"). ``factors`` gives each level a class, and rows whose levels are of the same
    classes follow each other in the result. A row of classes that earlier rows have is preferred to one of new classes
    unless it covers less than half as many pairs: there are few combinations of classes.
    """
    rng, place = random.Random(seed), {name: i for i, name in enumerate(factors)}
    levels = {name: [(name, level) for level in values] for name, values in factors.items()}
    # Lists in a fixed order: a set of texts has another order in every process.
    every = [level for values in levels.values() for level in values]
    apart: dict[Level, set[Level]] = {level: set() for level in every}
    for pair in refused:
        one, other = pair
        apart[one].add(other)
        apart[other].add(one)
    left = {one: {other for other in every if other[0] != one[0]} - apart[one] for one in every}

    def row_with(one: Level, other: Level, classes: tuple[str, ...] | None) -> list[Level] | None:
        row = [one, other]
        names = [name for name in factors if name not in (one[0], other[0])]
        rng.shuffle(names)
        for name in names:
            choices = [level for level in levels[name] if apart[level].isdisjoint(row)]
            if classes is not None:
                own = classes[place[name]]
                choices = [level for level in choices if factors[name][level[1]] == own]
            if not choices:
                return None
            row.append(max(choices, key=lambda level: (len(left[level].intersection(row)), rng.random())))
        return row

    def classes_of(row: list[Level]) -> tuple[str, ...]:
        found = dict(row)
        return tuple(factors[name][found[name]] for name in factors)

    def gain(row: list[Level]) -> int:
        return sum(len(left[level].intersection(row)) for level in row)

    rows: list[list[Level]] = []
    known: set[tuple[str, ...]] = set()
    while open_levels := [level for level in every if left[level]]:
        one = rng.choice(open_levels)
        other = rng.choice([level for level in every if level in left[one]])
        suited = [
            classes for classes in sorted(known)
            if all(classes[place[name]] == factors[name][level] for name, level in (one, other))
        ]  # fmt: skip
        some = rng.sample(suited, min(tries, len(suited)))
        same = [row for classes in some if (row := row_with(one, other, classes))]
        fresh = [row for _ in range(tries) if (row := row_with(one, other, None))]
        if not fresh:
            fresh = [row for _ in range(50 * tries) if (row := row_with(one, other, None))][:1]
        if not same and not fresh:
            raise ValueError(f"no row has {one} and {other}: the levels that these need are refused")
        best, reused = max(fresh, key=gain, default=[]), max(same, key=gain, default=[])
        row = reused if reused and 2 * gain(reused) >= gain(best) else best
        rows.append(row)
        known.add(classes_of(row))
        for level in row:
            left[level] -= set(row)
    order = list(dict.fromkeys(map(classes_of, rows)))
    rows.sort(key=lambda row: order.index(classes_of(row)))
    return [{name: dict(row)[name] for name in factors} for row in rows]


def with_rare(rows: list[Row], name: str, usual: str, rare: str) -> list[Row]:
    """The rows with one factor more, of whose two levels one is rare: in few rows, but in these with every level.

    For a level that is dear in any company, which in a covering array would be in half of the rows.
    """
    left = {item for row in rows for item in row.items()}
    chosen: list[Row] = []
    while left:
        chosen.append(max(rows, key=lambda row: len(left & set(row.items()))))
        left -= set(chosen[-1].items())
    return [{**row, name: rare if row in chosen else usual} for row in rows]

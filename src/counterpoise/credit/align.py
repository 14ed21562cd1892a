"""Two answers side by side: the edits that turn one into the other, by Levenshtein distance of
token ids (rapidfuzz).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def _levenshtein() -> Any:
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as missing:
        raise ImportError(
            "The credit rule 'edits' aligns tokens with rapidfuzz: pip install"
            " 'counterpoise[edits]'."
        ) from missing
    return Levenshtein


def edit_credit(
    failed_ids: Sequence[int],
    corrected_ids: Sequence[int],
    gain: float,
    first_edits: int | None = None,
) -> tuple[list[float], list[float]]:
    """Credit of a failed answer and of its correction: -gain on tokens that must go, +gain on
    tokens that must come, 0 elsewhere.

    The edits are a shortest sequence of single-token deletions, insertions and substitutions that
    turns the one into the other. Their sum is gain * (inserted - deleted) tokens, not 0.

    Args:
        failed_ids, corrected_ids: token ids.
        gain: r(corrected) - r(failed).
        first_edits: keep only so many edits, from the start; None keeps all.

    >>> edit_credit([1, 2, 3], [1, 9, 3, 4], 1.0)
    ([0.0, -1.0, 0.0], [0.0, 1.0, 0.0, 1.0])
    """
    failed, corrected = [0.0] * len(failed_ids), [0.0] * len(corrected_ids)
    for edit in list(_levenshtein().editops(failed_ids, corrected_ids))[:first_edits]:
        if edit.tag != "insert":
            failed[edit.src_pos] = -float(gain)
        if edit.tag != "delete":
            corrected[edit.dest_pos] = float(gain)
    return failed, corrected


def edit_distance(one_ids: Sequence[int], other_ids: Sequence[int], worst: float = 1.0) -> float:
    """Levenshtein distance over the longer length, in [0, 1]; 1.0 stands for anything above
    ``worst``.

    >>> edit_distance([1, 2, 3], [1, 9, 3, 4])
    0.5
    """
    longest = max(len(one_ids), len(other_ids))
    # counted in tokens: a cutoff on the share itself, compared in floats, loses distances that are
    # equal to it
    most = math.floor(worst * longest + 1e-9)
    num_edits = _levenshtein().distance(one_ids, other_ids, score_cutoff=most)
    return 1.0 if num_edits > most else num_edits / max(longest, 1)


def nearest_correct(
    failed_ids: Sequence[int], correct: Sequence[tuple[Sequence[int], float]]
) -> int:
    """The number of the correct answer nearest to a failed one, by normalised edit distance.

    Ties go to the higher reward, then to the lexicographically first ids, so that the order of the
    rollouts decides nothing.

    Args:
        failed_ids: token ids.
        correct: (token ids, reward) of each correct answer, at least one.

    >>> nearest_correct([1, 2, 3], [([7, 7], 1.0), ([1, 2, 4], 1.0)])
    1
    """
    best = (2.0,)
    for index, (ids, reward) in enumerate(correct):
        distance = edit_distance(failed_ids, ids, worst=min(best[0], 1.0))
        best = min(best, (distance, -reward, tuple(ids), index))
    return int(best[-1])

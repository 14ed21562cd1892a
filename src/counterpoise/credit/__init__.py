"""Credit rules: ``rule(credit_NT, batch, *, params) -> credit_NT``, one file a family.

Axes as in ``types``.

The first rule of a chain gets advantage * mask; the sign of a credit is its side, its size its
weight. Padding is 0 in and out."""

from __future__ import annotations

from counterpoise.credit.align import edit_credit, edit_distance, nearest_correct
from counterpoise.credit.association import ktae
from counterpoise.credit.combine import even_mass, keep_mass, mix, only_negative, only_positive
from counterpoise.credit.delta import delta
from counterpoise.credit.difficulty import focal
from counterpoise.credit.divergence import divergence_from_group, group_divergence
from counterpoise.credit.edits import edits
from counterpoise.credit.entropy import entropy_filter, spurious, top_entropy
from counterpoise.credit.implied import implied_advantage
from counterpoise.credit.influence import answer_influence
from counterpoise.credit.mismatch import mismatch_weight
from counterpoise.credit.negatives import (
    negative_mass,
    negative_token_filter,
    negatives,
    soften_negatives,
    surprise_negatives,
)
from counterpoise.credit.overlap import conflict, shared_prefix
from counterpoise.credit.prefix_value import prefix_value
from counterpoise.credit.probability import covariance, kl_penalty, probability_scaled
from counterpoise.credit.scores import information_gain, turn_credit
from counterpoise.credit.states import state_groups
from counterpoise.credit.surprisal import rare_uncertain, surprisal_boost
from counterpoise.credit.teacher import proximal_teacher, teacher
from counterpoise.credit.tree_gain import tree_gain
from counterpoise.credit.turns import mt_grpo, turn_baseline, turn_index_baseline
from counterpoise.credit.uniform import uniform
from counterpoise.credit.value_baseline import value_baseline
from counterpoise.credit.whitening import only_improbable, whiten
from counterpoise.stage import Stage

RULES: dict[str, Stage] = {
    "uniform": uniform,
    "delta": delta,
    "negative_token_filter": negative_token_filter,
    "edits": edits,
    "top_entropy": top_entropy,
    "conflict": conflict,
    "entropy_filter": entropy_filter,
    "probability_scaled": probability_scaled,
    "ktae": ktae,
    "shared_prefix": shared_prefix,
    "spurious": spurious,
    "covariance": covariance,
    "focal": focal,
    "kl_penalty": kl_penalty,
    "soften_negatives": soften_negatives,
    "surprise_negatives": surprise_negatives,
    "negative_mass": negative_mass,
    "negatives": negatives,
    "value_baseline": value_baseline,
    "mismatch_weight": mismatch_weight,
    "turn_baseline": turn_baseline,
    "turn_index_baseline": turn_index_baseline,
    "mt_grpo": mt_grpo,
    "state_groups": state_groups,
    "information_gain": information_gain,
    "turn_credit": turn_credit,
    "surprisal_boost": surprisal_boost,
    "rare_uncertain": rare_uncertain,
    "group_divergence": group_divergence,
    "prefix_value": prefix_value,
    "only_improbable": only_improbable,
    "whiten": whiten,
    "tree_gain": tree_gain,
    "teacher": teacher,
    "proximal_teacher": proximal_teacher,
    "implied_advantage": implied_advantage,
    "answer_influence": answer_influence,
    "keep_mass": keep_mass,
    "even_mass": even_mass,
    "only_positive": only_positive,
    "only_negative": only_negative,
    "mix": mix,
}

__all__ = [
    "RULES",
    "answer_influence",
    "conflict",
    "covariance",
    "delta",
    "divergence_from_group",
    "edit_credit",
    "edit_distance",
    "edits",
    "entropy_filter",
    "even_mass",
    "focal",
    "group_divergence",
    "implied_advantage",
    "information_gain",
    "keep_mass",
    "kl_penalty",
    "ktae",
    "mismatch_weight",
    "mix",
    "mt_grpo",
    "nearest_correct",
    "negative_mass",
    "negative_token_filter",
    "negatives",
    "only_improbable",
    "only_negative",
    "only_positive",
    "prefix_value",
    "probability_scaled",
    "proximal_teacher",
    "rare_uncertain",
    "shared_prefix",
    "soften_negatives",
    "spurious",
    "state_groups",
    "surprisal_boost",
    "surprise_negatives",
    "teacher",
    "top_entropy",
    "tree_gain",
    "turn_baseline",
    "turn_credit",
    "turn_index_baseline",
    "uniform",
    "value_baseline",
    "whiten",
]

"""Published methods as points on the six axes.

A preset holds the vetted defaults of its source; change any axis by name.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import warnings
from typing import Any

import torch

from counterpoise.catalogue.method import AXES, Method, change_axes
from counterpoise.catalogue.registry import FAMILIES
from counterpoise.errors import nearest
from counterpoise.stage import bound, describe, parameters
from counterpoise.types import COLUMNS, TokenBatch

ENTRY_POINTS = "counterpoise.methods"
CLIP = {"name": "clipped", "clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"name": "clipped", "clip_low": 0.2, "clip_high": 0.28}
DELTA_CLIP = {**CLIP_HIGHER, "dual_clip": 10.0}
DEFAULT: dict[str, Any] = {
    "advantage": "group_zscore",
    "credit": [],
    "loss": CLIP_HIGHER,
    "reduction": "per_token",
    "plan": "random_rows",
    "controller": None,
}

# name -> (summary, reference, axes that differ from DEFAULT)
PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grpo": (
        "Group z-score, token clip, mean over each rollout.",
        "arXiv 2402.03300",
        {"loss": CLIP, "reduction": "per_sequence"},
    ),
    "dr_grpo": (
        "GRPO without the std and without the length normaliser.",
        "arXiv 2503.20783",
        {"advantage": "group_mean", "loss": CLIP, "reduction": "constant_length"},
    ),
    "dapo": ("Clip-higher and one token mean over the update.", "arXiv 2503.14476", {}),
    "gspo": (
        "One ratio a rollout, clipped as a whole.",
        "arXiv 2507.18071",
        {"loss": "sequence_ratio", "reduction": "per_sequence"},
    ),
    "cispo": (
        "Clipped ratio as a detached weight: no token loses its gradient.",
        "arXiv 2506.13585",
        {"loss": "detached_ratio"},
    ),
    "sapo": (
        "A smooth gate instead of a clip.",
        "arXiv 2511.20347",
        {"loss": "soft_gate", "reduction": "per_sequence"},
    ),
    "rloo": (
        "Baseline is the mean of the other rollouts.",
        "arXiv 2402.14740",
        {"advantage": "leave_one_out", "loss": CLIP},
    ),
    "reinforce_pp": (
        "Whitened over the batch; works with one rollout a prompt.",
        "arXiv 2501.03262",
        {"advantage": "batch_whitened", "loss": CLIP},
    ),
    "psr": (
        "Learns from correct rollouts only.",
        "arXiv 2506.01347",
        {"advantage": "positives_only", "loss": CLIP},
    ),
    "nsr": (
        "Learns from failed rollouts only.",
        "arXiv 2506.01347",
        {"advantage": "negatives_only", "loss": CLIP},
    ),
    "w_reinforce": (
        "Correct rollouts count a tenth of failed ones.",
        "arXiv 2506.01347",
        {"advantage": "weighted_signs", "loss": CLIP},
    ),
    "max_rl": (
        "(R - m)/m: approaches maximum likelihood on hard prompts.",
        "arXiv 2602.02710",
        {"advantage": "max_rl", "loss": CLIP},
    ),
    "gmpo": (
        "Geometric mean of token ratios, clipped in log space.",
        "arXiv 2507.20673",
        {"loss": "geometric", "reduction": "per_sequence"},
    ),
    "ctpo": (
        "Prefix products of ratios, bounds that grow with the square root of the position.",
        "arXiv 2605.07331",
        {"loss": "cumulative"},
    ),
    "tpo": (
        "Cross-entropy to a target distribution over each group.",
        "arXiv 2604.06159",
        {
            "loss": "target",
            "reduction": {"name": "constant_length", "length": 1},
            "plan": "query_preserved",
        },
    ),
    "delta": (
        "Weights tokens by what sets good rollouts apart from bad ones.",
        "arXiv 2605.21467",
        {"credit": ["delta"], "loss": DELTA_CLIP},
    ),
    "fade": (
        "Solve-rate power and failure weight, steered by running solve rate and entropy.",
        "arXiv 2607.01490",
        {"advantage": "fade", "controller": "fade"},
    ),
    "crf_ntf": (
        "Contrastive REINFORCE; of failed rollouts only the rarest tenth of tokens is punished.",
        "arXiv 2606.17250",
        {
            "advantage": "signs",
            "credit": ["negative_token_filter"],
            "loss": "contrastive",
            "reduction": "side_means",
        },
    ),
    "ntf_whitened": (
        "The same filter under batch-whitened advantages.",
        "arXiv 2606.17250",
        {
            "advantage": "batch_whitened",
            "credit": ["negative_token_filter"],
            "loss": CLIP,
            "reduction": "per_sequence",
        },
    ),
    "dfpo_min": (
        "Every rollout of a group weighs as the least: shared tokens cancel exactly.",
        "arXiv 2604.13088v1, Eq. 17",
        {
            "advantage": "group_mean",
            "loss": {"name": "dfpo", "transform": "min"},
            "reduction": "constant_length",
            "plan": "query_preserved",
        },
    ),
    "dfpo_orth": (
        "Sequence weights made orthogonal to the advantages: shared tokens cancel exactly.",
        "arXiv 2604.13088v1, Eq. 18",
        {
            "advantage": "group_mean",
            "loss": {"name": "dfpo", "transform": "orth"},
            "reduction": "constant_length",
            "plan": "query_preserved",
        },
    ),
    "ibpo": (
        "Credit only where a failed rollout differs from its nearest correct sibling.",
        "arXiv 2605.16302",
        {
            "advantage": "group_mean",
            "credit": ["edits"],
            "reduction": {"name": "per_token", "count": "credited"},
            "plan": "query_preserved",
        },
    ),
    "gtpo": (
        "Tokens that correct and failed rollouts share are not punished.",
        "arXiv 2508.03772",
        {"credit": ["conflict"], "loss": CLIP},
    ),
    "top_entropy": (
        "Credit on the fifth of tokens with the highest entropy.",
        "arXiv 2506.01939",
        {"credit": ["top_entropy"]},
    ),
    "ar": (
        "Credit scaled down on improbable tokens.",
        "arXiv 2505.12929",
        {"credit": ["probability_scaled"], "loss": CLIP},
    ),
    "ktae": (
        "Adds each token's association with correctness in its group.",
        "arXiv 2505.16826",
        {"credit": ["ktae"]},
    ),
    "stapo": (
        "Drops rare confident tokens of correct rollouts.",
        "arXiv 2602.15620",
        {"credit": ["spurious"]},
    ),
    "clip_cov": (
        "Detaches a few tokens whose log-prob and advantage co-vary most.",
        "arXiv 2505.22617",
        {"loss": "clip_cov"},
    ),
    "f_grpo": (
        "Focal weight (1 - solve rate)^gamma on each prompt.",
        "arXiv 2602.06717",
        {"credit": ["focal"], "loss": CLIP},
    ),
}

_registered: dict[str, Method] = {}
_plugins_loaded = False


def method(name: str, **axes: Any) -> Method:
    """A preset with some axes changed, checked by a dry run.

    Args:
        name: a preset, see ``methods()``.
        axes: ``advantage``, ``credit``, ``loss``, ``reduction``, ``plan``, ``controller``: a name,
            a mapping with ``name`` and parameters, a
            bound stage, for ``credit`` and ``loss`` also a list of them; a mapping without ``name``
            changes parameters of the preset's stage.

    >>> method("dapo", plan="query_preserved", credit=[{"name": "top_entropy", "fraction": 0.2}]).needs
    frozenset({'entropy_NT'})
    """
    load_plugins()
    made = change_axes(_preset(name), axes)
    dry_run(made)
    return made


def methods() -> dict[str, dict[str, Any]]:
    """Every preset: its summary, reference, axes, the parameters of its stages and the columns it
    needs; JSON.

    >>> methods()["dfpo_min"]["axes"]["loss"]
    [{'name': 'dfpo', 'transform': 'min'}]
    """
    load_plugins()
    return {name: _info(_preset(name)) for name in [*PRESETS, *_registered]}


def register_method(name: str, made: Method) -> Method:
    """Make a method of your own available as ``method(name)``."""
    if name in PRESETS or name in _registered:
        raise ValueError(f"register_method: {name!r} is taken. Choose another name.")
    dry_run(made)
    _registered[name] = dataclasses.replace(made, name=name)
    return _registered[name]


def load_plugins() -> None:
    """Run every entry point of the group ``counterpoise.methods`` once; one that fails is
    named in a warning.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            point.load()()
        except Exception as error:
            warnings.warn(
                f"counterpoise plug-in {point.name!r} ({point.value}) failed: {error!r}. Its"
                " methods are missing.",
                stacklevel=2,
            )


def dry_run(made: Method) -> None:
    """Run every stage on two rollouts of three tokens, so that a wrong parameter shows now and not
    at batch 300.
    """
    try:
        batch = _example(made)
        rows = made.rows(batch, made.assign(batch), made.plan(batch, num_updates=1).updates[0])
        made.loss(torch.full_like(rows.sampler_logp_NT, -0.5), rows)
    except ValueError as error:
        raise ValueError(f"method {made.name!r}: {error}") from None
    except Exception as error:
        raise ValueError(
            f"method {made.name!r} does not run on a 2 x 3 example: {error!r}"
        ) from error


def _preset(name: str) -> Method:
    if name in _registered:
        return _registered[name]
    if name not in PRESETS:
        raise ValueError(f"unknown method {name!r}. {nearest(name, [*PRESETS, *_registered])}")
    summary, reference, axes = PRESETS[name]
    unset: Any = None
    blank = Method(name, unset, (), (), unset, unset, reference=reference, summary=summary)
    return change_axes(blank, {**DEFAULT, **axes})


def _example(made: Method) -> TokenBatch:
    gen = torch.Generator().manual_seed(0)
    ready: dict[str, torch.Tensor] = {
        "entropy_NT": torch.rand(2, 3, generator=gen) + 0.1,
        "trainer_logp_NT": torch.full((2, 3), -0.7),
        "ref_logp_NT": torch.full((2, 3), -0.8),
        "hidden_NTD": torch.randn(2, 3, 4, generator=gen),
        "topk_ids_NTK": torch.arange(3).expand(2, 3, 3),
        "topk_logp_NTK": torch.full((2, 3, 3), -1.2),
        "head_VD": torch.randn(8, 4, generator=gen),
    }
    extra = {name: torch.rand(2, 3, generator=gen) for name in made.needs if name not in COLUMNS}
    return TokenBatch(
        token_ids_NT=torch.tensor([[1, 2, 3], [1, 4, 5]]),
        mask_NT=torch.ones(2, 3, dtype=torch.bool),
        group_N=torch.zeros(2, dtype=torch.long),
        reward_N=torch.tensor([1.0, 0.0]),
        sampler_logp_NT=torch.tensor([[-0.1, -0.5, -1.0], [-0.1, -0.6, -1.1]]),
        extra=extra,
        **{name: value for name, value in ready.items() if name in made.needs},  # pyright: ignore[reportArgumentType]
    )


def _info(made: Method) -> dict[str, Any]:
    described = made.describe()
    return {
        "summary": made.summary,
        "reference": made.reference,
        "axes": {axis: described[axis] for axis in AXES},
        "parameters": {
            axis: _axis_parameters(axis, getattr(made, field)) for axis, field in AXES.items()
        },
        "needs": sorted(made.needs),
    }


def _axis_parameters(axis: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    stages = value if axis in ("credit", "loss") else (value,)
    return {
        describe(FAMILIES[axis], stage)["name"]: {**parameters(stage), **bound(stage)}
        for stage in stages
    }

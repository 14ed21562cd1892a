"""Two processes over gloo give the credit, scale and state of one process, to 1e-12 in float64.

Run as a script this file is one rank: ``python test_distributed.py RANK STORE OUT``. All cases run
in one pair of processes."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import counterpoise as cp
from counterpoise.advantages import ADVANTAGES
from counterpoise.credit import RULES
from counterpoise.maths.reduce import LOCAL, over_ranks
from counterpoise.reductions import REDUCTIONS
from helpers import conformance_table
from helpers.full_batch import with_turns, with_values

WORLD, VOCAB, HIDDEN, KEPT = 2, 11, 4, 3
LENGTHS = (5, 3, 7, 4, 2, 6, 3, 8, 4, 9, 1, 5)
GROUP = (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)  # prompt 2 is solved by all: advantage 0
REWARD = (1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0)
# how rollouts are dealt to the two ranks: whole prompts, uneven; and all positive advantages on one
# rank
SPLITS = {
    "prompts": ([0, 1, 2, 9, 10, 11, 6, 7, 8], [3, 4, 5]),
    "sides": ([0, 3, 4, 11], [1, 2, 5, 6, 7, 8, 9, 10]),
}


@functools.cache
def _cases():
    """name -> (split, preset, axes)"""
    delta = {
        "row": {},
        "topk": {"proxy": "topk"},
        "head": {"proxy": "head"},
        "within_side": {"score": "within_side", "proxy": "topk"},
        "hard": {"hard": True, "refinements": 3},
        "count_credited": {"count_zero": False, "refinements": 2},
        "top": {"select": "top", "select_frac": 0.3},
        "random": {"score": "random"},
        "select_random": {"select": "random"},
    }
    cases = {
        f"delta/{name}": ("prompts", "delta", {"credit": params}) for name, params in delta.items()
    }
    # whitened over the batch, so that an advantage does not need its prompt's other rollouts on its
    # rank
    cases |= {
        f"delta by side/{name}": (
            "sides",
            "delta",
            {"advantage": "batch_whitened", "credit": params},
        )
        for name, params in delta.items()
    }
    cases |= {
        f"advantage/{name}": ("prompts", "dapo", {"advantage": _named(name, "ADVANTAGES")})
        for name in ADVANTAGES
    }
    cases |= {f"rule/{name}": ("prompts", "dapo", {"credit": [_rule(name)]}) for name in RULES}
    cases |= {
        f"reduction/{name}": ("prompts", "dapo", {"reduction": _named(name, "REDUCTIONS")})
        for name in REDUCTIONS
    }
    cases |= {f"preset/{name}": ("prompts", name, {}) for name in cp.methods()}
    cases["controller/entropy_target"] = (
        "prompts",
        "fade",
        {
            "controller": {
                "name": "entropy_target",
                **conformance_table.CONTROLLERS["entropy_target"],
            }
        },
    )
    return cases


def _named(name, table):
    return {"name": name, **getattr(conformance_table, table)[name].params}


def _rule(name):
    params = dict(conformance_table.RULES[name].params)
    if "rules" in params:
        params["rules"] = tuple(
            RULES[inner](**conformance_table.RULES[inner].params) for inner in params["rules"]
        )
    return {"name": name, **params}


@functools.cache
def _batch(seed):
    """Twelve rollouts of four prompts with every column, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    shape = (len(LENGTHS), max(LENGTHS))
    hidden_NTD, head_VD = draw(*shape, HIDDEN), draw(VOCAB, HIDDEN)
    logp_NTV = torch.log_softmax(hidden_NTD @ head_VD.T, -1)
    best, entropy_NT = logp_NTV.topk(KEPT), -(logp_NTV.exp() * logp_NTV).sum(-1)
    batch = cp.TokenBatch.from_lists(
        ids,
        group=GROUP,
        reward=REWARD,
        sampler_logp=[[0.0] * n for n in LENGTHS],
        dtype=torch.float64,
        max_length=max(LENGTHS),
    )
    sampler_logp_NT = logp_NTV.gather(-1, batch.token_ids_NT[..., None]).squeeze(-1)
    return with_values(with_turns(batch, seed), seed).replace(
        sampler_logp_NT=sampler_logp_NT,
        trainer_logp_NT=sampler_logp_NT + 0.1 * draw(*shape),
        ref_logp_NT=sampler_logp_NT + 0.1 * draw(*shape),
        ref_kl_NT=draw(*shape).square(),
        importance_NT=draw(*shape).abs() - 0.2,
        entropy_NT=entropy_NT,
        hidden_NTD=hidden_NTD,
        head_VD=head_VD,
        topk_ids_NTK=best.indices,
        topk_logp_NTK=best.values,
        teacher_logp_NT=sampler_logp_NT - 0.5 * draw(*shape).abs(),
        has_teacher_N=torch.arange(len(LENGTHS)) % 4 != 1,
    )


def _share(batch, rows):
    """The rollouts of a rank, padded to the rank's own longest response."""
    part = batch.select(torch.tensor(rows))
    width = int(part.length_N.max())
    columns = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return part.replace(
        **{name: column[:, :width] for name, column in columns.items() if "_NT" in name}
    )


def _run(case, rows, reduce):
    """Credit, scale, state and metrics of two batches in a row, for the given rollouts."""
    _, preset, axes = case
    method, state, out = cp.method(preset, **axes), None, []
    for batch_number in range(2):
        part = _share(_batch(batch_number), rows)
        credit = method.assign(part, state, reduce=reduce, seed=7, batch_number=batch_number)
        scale_NT = method.rows(part, credit, torch.arange(len(rows)), reduce=reduce).scale_NT
        state = credit.state
        out.append(
            {
                "credit": [row[:n] for row, n in zip(credit.credit_NT, part.length_N.tolist())],
                "scale": [row[:n] for row, n in zip(scale_NT, part.length_N.tolist())],
                "numbers": _numbers({"state": state, "metrics": credit.metrics}),
            }
        )
    return out


def _numbers(tree, path=""):
    """Every number of nested dicts and lists, by path."""
    if isinstance(tree, (dict, list)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            key: value
            for name, inner in items
            for key, value in _numbers(inner, f"{path}/{name}").items()
        }
    return {} if tree is None else {path: float(tree)}


def _rank(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    results = {
        name: _run(case, SPLITS[case[0]][rank], over_ranks()) for name, case in _cases().items()
    }
    torch.save({"world": dist.get_world_size(), "results": results}, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two processes computed: [rank][case] -> two batches."""
    folder = tmp_path_factory.mktemp("ranks")
    outs = [folder / f"rank_{rank}.pt" for rank in range(WORLD)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder / "store"), str(out)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
                ),
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * WORLD, "\n".join(errors)
    loaded = [torch.load(out) for out in outs]
    assert [one["world"] for one in loaded] == [WORLD] * WORLD
    return [one["results"] for one in loaded]


@pytest.mark.parametrize("name", _cases())
def test_two_ranks_equal_one_process(ranks, name):
    case = _cases()[name]
    whole = _run(case, range(len(LENGTHS)), LOCAL)
    for batch_number, expected in enumerate(whole):
        for rank, rows in enumerate(SPLITS[case[0]]):
            actual = ranks[rank][name][batch_number]
            for key in ("credit", "scale"):
                for row_T, row in zip(actual[key], rows):
                    torch.testing.assert_close(
                        row_T,
                        expected[key][row],
                        rtol=0,
                        atol=1e-12,
                        msg=lambda text, key=key: f"{key}: {text}",
                    )
            assert actual["numbers"] == pytest.approx(expected["numbers"], rel=1e-12, abs=1e-12)


POOLING = (
    "delta/row",
    "delta/topk",
    "delta/head",
    "rule/top_entropy",
    "advantage/batch_whitened",
    "advantage/group_mean_batch_std",
)


@pytest.mark.parametrize("name", POOLING)
def test_without_pooling_a_rank_disagrees(name):
    """The statistics of one rank alone give another credit: the equality above is not for lack of
    difference.
    """
    case = _cases()[name]
    rows = SPLITS["prompts"][0]
    whole, alone = _run(case, range(len(LENGTHS)), LOCAL)[0], _run(case, rows, LOCAL)[0]
    gap = max(
        (row_T - whole["credit"][row]).abs().max().item()
        for row_T, row in zip(alone["credit"], rows)
    )
    assert gap > 1e-3


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])

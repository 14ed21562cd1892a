"""Scripts of tiny trainings in processes of their own, and their results against one another."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch

SETTINGS = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def launched(script, out, names, *, world=2, path=()):
    """What a script wrote to ``out``; its processes start once for all scenarios. ``path`` goes
    before the folders of PYTHONPATH.

    ``accelerate launch --cpu`` would run one process whatever one asks for, hence torchrun.
    """
    start = [sys.executable]
    if world > 1:
        start += ["-m", "torch.distributed.run", "--nproc_per_node", str(world)]
        start += ["--master_port", free_port()]
    folders = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [*start, str(script), str(out), *names],
        env=os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return torch.load(out)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def assert_same_training(got, expected):
    """Two processes against one: credit, plans, weights."""
    assert (expected["world"], got["world"]) == (1, 2)
    assert len(got["credit"]) == len(expected["credit"]) == 2
    for credit_NT, expected_NT in zip(got["credit"], expected["credit"]):
        assert expected_NT.abs().sum() > 0
        size = max(1.0, float(expected_NT.abs().max()))
        torch.testing.assert_close(credit_NT, expected_NT, rtol=0, atol=2e-6 * size)
    assert got["plans"] == expected["plans"]
    assert got["plans"][0] is not None
    moved = max(
        float((expected["weights"][name] - expected["start"][name]).abs().max())
        for name in expected["weights"]
    )
    gap = max(
        float((expected["weights"][name] - got["weights"][name]).abs().max())
        for name in expected["weights"]
    )
    assert moved > 1e-4
    assert gap < 1e-3 * moved

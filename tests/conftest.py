"""Names of tests, which must be the same in every worker process (functions are named, not printed
with their address), examples without a clock, and fixtures of several files.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

# a shell's background job ignores Ctrl-C, and so would every command that a test starts and stops
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# tasks and plug-ins of the tests are found by the commands that tests start
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
)

try:  # verl's environment has no hypothesis
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    # a busy machine must not fail a test: no example has a time limit; and a test that passed
    # passes again: the examples are the same every time, unless --hypothesis-profile=search
    for name, is_fixed in (("fixed", True), ("search", False)):
        settings.register_profile(
            name, deadline=None, derandomize=is_fixed, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile("fixed")


def pytest_make_parametrize_id(config: Any, val: Any, argname: str) -> str | None:
    if not callable(val) or isinstance(val, type):
        return None
    params = "-".join(
        f"{key}={value}"
        for key, value in getattr(val, "params", {}).items()
        if isinstance(value, (str, int, float))
    )
    return f"{getattr(val, '__name__', type(val).__name__)}{f'({params})' if params else ''}"


@pytest.fixture
def wide_norms(monkeypatch):
    """The norms of Hugging Face compute in float32 whatever comes in; here they keep float64, so
    that rounding hides nothing.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self, x):
        return (
            self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        )

    for norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)

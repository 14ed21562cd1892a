"""Does a host still behave as we rely on? Each check runs the real thing on a tiny example and
names the fix where it fails.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from counterpoise.hosts.trl.selftest import Probe

TESTED_TRL = "1.16.0"
FIX = (
    f"pip install 'trl=={TESTED_TRL}' (the version that counterpoise was tested with), and report"
    " the version you have"
)
FIX_VERSION = f"pip install 'trl=={TESTED_TRL}'"
FIX_VERL = (
    "pip install 'verl==0.9.1' (the version that counterpoise was tested with), and report the"
    " version you have"
)

# what we call or override, with the leading parameters that we rely on
TRL_SIGNATURES = {
    "_generate_and_score_completions": ("self", "inputs"),
    "_prepare_inputs": ("self", "generation_batch"),
    "_compute_loss": ("self", "model", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_get_per_token_logps_and_entropies": ("self", "model"),
    "get_off_policy_mask": ("advantages", "per_token_logps"),
}


class Check(NamedTuple):
    """One thing that was looked at: ``found`` in words, ``fix`` empty if all is well."""

    name: str
    is_ok: bool
    found: str
    fix: str = ""


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def check_trl() -> list[Check]:
    """TRL's version, the signatures, and by a training of two updates: credit reaches the loss
    token by token, the plan decides the rows.

    >>> import counterpoise.hosts.check as check
    >>> all(one.is_ok for one in check.check_trl()) if check.is_installed("trl") else True
    True
    """
    if not is_installed("trl"):
        return [Check("trl", False, "not installed", "pip install 'counterpoise[trl]'")]
    checks = [_attempt("trl version", _version, FIX_VERSION)]
    if checks[0].is_ok:
        checks += [_attempt("trl signatures", _signatures)]
        checks += _training()
    return checks


def check_verl() -> list[Check]:
    """What of counterpoise verl has loaded, and by two rollouts of two tokens: credit reaches
    verl's loss. Call it in a fresh process.
    """
    from counterpoise.hosts.verl import registry, selftest

    names = registry.registration()
    counts = (
        f"{len(names.estimators)} estimators, {len(names.losses)} losses, {len(names.trainers)}"
        " trainers"
    )
    plugin = Check(
        "verl plug-in",
        not names.problems,
        f"verl {names.version}: {counts} of counterpoise",
        " ".join(names.problems),
    )
    if not names.estimators:
        return [plugin]
    checks = [plugin, _attempt("verl loss", selftest.check_credit, FIX_VERL)]
    if names.trainers:
        checks.append(_attempt("verl settings", selftest.check_unread, FIX_VERL))
    return checks + [Check("verl functions", True, names.checked)] * bool(names.checked)


def _attempt(name: str, look: Callable[[], str], fix: str = FIX) -> Check:
    """``look`` returns what it found; an error is a failed check with the message."""
    try:
        return Check(name, True, look())
    except ValueError as error:
        return Check(name, False, str(error), fix)
    except Exception as error:
        return Check(name, False, repr(error), fix)


def _version() -> str:
    import trl

    from counterpoise.hosts.trl.checks import check_version

    check_version(trl.__version__)
    return trl.__version__


def _signatures() -> str:
    from trl.trainer.grpo_trainer import GRPOTrainer

    for name, expected in TRL_SIGNATURES.items():
        method = getattr(GRPOTrainer, name, None)
        if method is None:
            raise ValueError(f"GRPOTrainer has no {name}")
        got = tuple(inspect.signature(method).parameters)[: len(expected)]
        if got != expected:
            raise ValueError(f"GRPOTrainer.{name} takes {got}, expected {expected}")
    return f"{len(TRL_SIGNATURES)} methods as expected"


def _training() -> list[Check]:
    try:
        from counterpoise.hosts.trl.selftest import probe

        training = probe()
    except Exception as error:
        return [Check("trl training", False, repr(error), FIX)]
    return [
        _attempt("trl takes (B, T) advantages", lambda: check_credit(training)),
        _attempt("trl trains on the plan's rows", lambda: check_plan(training)),
    ]


def check_credit(training: Probe) -> str:
    """The derivative of TRL's loss by a token's log-prob is 0 exactly where the token's credit is
    0, and has its sign elsewhere.
    """
    num_tokens, num_without = 0, 0
    for micro in training.micros:
        if micro.credit_NT.shape != micro.grad_NT.shape:
            raise ValueError(
                f"the loss got advantages of shape {list(micro.credit_NT.shape)}, expected"
                f" {list(micro.grad_NT.shape)}"
            )
        wrong_NT = (micro.credit_NT.sign() != -micro.grad_NT.sign()) & micro.mask_NT
        if micro.is_first_update and wrong_NT.any():
            raise ValueError(
                f"{int(wrong_NT.sum())} tokens got a gradient that is not their credit's"
            )
        num_tokens, num_without = (
            num_tokens + int(micro.mask_NT.sum()),
            num_without + int((micro.credit_NT == 0)[micro.mask_NT].sum()),
        )
    if not 0 < num_without < num_tokens:
        raise ValueError(
            f"{num_without} of {num_tokens} tokens were without credit: the rule had nothing to"
            " tell apart"
        )
    return f"{num_tokens} tokens, {num_without} of them without credit and without gradient"


def check_plan(training: Probe) -> str:
    """Each update was trained on the rows that the plan gave it."""
    if training.trained_rows != training.planned_rows:
        raise ValueError(
            f"trained on rows {training.trained_rows}, planned were {training.planned_rows}"
        )
    return f"{len(training.planned_rows)} updates of whole prompts"

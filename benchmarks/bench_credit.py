"""Time of every credit rule: as a multiple of one log-softmax over the vocabulary, and as a share
of a whole training batch.

    python benchmarks/bench_credit.py [--json PATH] [--rules delta top_entropy] [--rollouts 512
    --tokens 1024] python benchmarks/bench_credit.py --share-of bundled [--data asdiv.jsonl]
    [--prompts 64 --new-tokens 112]

Columns: ``ratio`` time of the rule / time of the log-softmax; ``report`` the same for the rule's
    own logged numbers; ``x4`` and ``x16`` time on
4 and 16 times a sixteenth of the rollouts / time on that sixteenth (4 and 16 are linear); ``peak``
the most memory above the inputs. With
``--share-of MODEL``: ``share`` time of the rule / time of one batch of the trainer
(sampling, grading, four updates) on the same rollouts; ``columns`` what the columns that
the rule needs add to sampling, as a share of the same batch.

Times are medians. What would take minutes is measured on a part of the tokens and multiplied up,
and the line says so. On a machine that does other work meanwhile, ``--cpu-time`` counts processor
time instead of time on the wall.

All rollouts have the full length, so the number of response tokens is rollouts * tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import device_name, now
from torch import Tensor

from counterpoise import TokenBatch
from counterpoise.advantages import group_zscore
from counterpoise.credit import RULES, top_entropy
from counterpoise.maths.reduce import LOCAL, seeded_generator
from counterpoise.stage import call

GROUP_SIZE, TOPK = 8, 20
SOFTMAX_TOKENS, SOFTMAX_CHUNK = 8192, 512
HEAD_TOKENS = 512  # of proxy="head", which multiplies every token eight times with the whole head


class Case(NamedTuple):
    """A rule with parameters. ``tokens``: measure on so many and multiply up; None: all."""

    name: str
    params: dict[str, Any]
    tokens: int | None = None


class Timing(NamedTuple):
    """Seconds, from how many repetitions, and bytes above the inputs (None where the system does
    not tell).
    """

    rule_s: float
    report_s: float | None
    repeats: int
    peak_bytes: int | None


class Clock(NamedTuple):
    """How to take time: the clock, repetitions after a warm-up, and the seconds after which it
    stops repeating.
    """

    now: Callable[[], float]
    repeats: int
    budget_s: float = 30.0

    def median(self, run: Callable[[], object]) -> tuple[float, int]:
        """(median seconds, repetitions); where the first run alone passes the budget, it is the one
        repetition.
        """
        times: list[float] = []
        for _ in range(self.repeats + 1):
            start = self.now()
            run()
            times.append(self.now() - start)
            if sum(times) > self.budget_s:
                break
        kept = times[1:] or times
        return statistics.median(kept), len(kept)


# rules whose default is not the whole story; every other rule runs with its defaults
CASES = {
    "delta": [
        Case("delta", {"proxy": "row"}),
        Case("delta", {"proxy": "topk"}),
        Case("delta", {"proxy": "head"}, HEAD_TOKENS),
    ],
    "covariance": [Case("covariance", {"fraction": 2e-4, "low": 1.0, "high": 5.0})],
    "keep_mass": [Case("keep_mass", {"rule": top_entropy()})],
    "even_mass": [Case("even_mass", {"rule": top_entropy()})],
    "only_positive": [Case("only_positive", {"rule": top_entropy()})],
    "only_negative": [Case("only_negative", {"rule": top_entropy()})],
}


def cases(names: list[str]) -> list[Case]:
    """Every rule asked for; a rule that must be given a parameter and has no case here is an error,
    not a gap.
    """
    out = []
    for name in names:
        missing = [
            key
            for key, default in RULES[name].parameters.items()
            if default is inspect.Parameter.empty
        ]
        if name not in CASES and missing:
            raise SystemExit(
                f"bench_credit: rule {name!r} needs the parameter {missing[0]!r}; add a row to"
                " CASES."
            )
        out += CASES.get(name, [Case(name, {})])
    return out


def example(
    num_rollouts: int, num_tokens: int, hidden_size: int, vocab: int, needs: frozenset[str]
) -> TokenBatch:
    """Rollouts in groups of eight, three solved, every eighth group solved by all; siblings share a
    prefix and differ by edits.
    """
    generator = torch.Generator().manual_seed(0)
    num_groups = -(-num_rollouts // GROUP_SIZE)
    group_N = torch.arange(num_rollouts) // GROUP_SIZE
    shape = (num_rollouts, num_tokens)
    ids_NT = torch.randint(vocab, (num_groups, num_tokens), generator=generator)[group_N]
    branch_N1 = torch.randint(num_tokens, (num_rollouts, 1), generator=generator)
    is_edit_NT = (torch.arange(num_tokens) >= branch_N1) & (
        torch.rand(shape, generator=generator) < 0.3
    )
    ids_NT = torch.where(is_edit_NT, torch.randint(vocab, shape, generator=generator), ids_NT)
    columns: dict[str, Callable[[], Tensor]] = {
        "entropy_NT": lambda: 2 * torch.rand(shape, generator=generator),
        "trainer_logp_NT": lambda: -2 * torch.rand(shape, generator=generator),
        "ref_logp_NT": lambda: -2 * torch.rand(shape, generator=generator),
        "hidden_NTD": lambda: torch.randn(*shape, hidden_size, generator=generator),
        "head_VD": lambda: torch.randn(vocab, hidden_size, generator=generator) / hidden_size**0.5,
        "topk_ids_NTK": lambda: torch.randint(vocab, (*shape, TOPK), generator=generator),
        "turn_score_NU": lambda: torch.rand(num_rollouts, 1, generator=generator),
        "topk_logp_NTK": lambda: -5 * torch.rand(*shape, TOPK, generator=generator),
    }
    return TokenBatch(
        token_ids_NT=ids_NT,
        mask_NT=torch.ones(shape, dtype=torch.bool),
        group_N=group_N,
        reward_N=((torch.arange(num_rollouts) % GROUP_SIZE < 3) | (group_N % 8 == 7)).float(),
        sampler_logp_NT=-2 * torch.rand(shape, generator=generator),
        max_length=num_tokens,
        **{name: columns[name]() for name in sorted(needs)},  # pyright: ignore[reportArgumentType]
    )


def softmax_seconds(vocab: int, num_tokens: int, clock: Clock) -> float:
    """One log-softmax for ``num_tokens`` tokens, from a measured part of them."""
    logits_CV = torch.randn(SOFTMAX_CHUNK, vocab)
    measured = min(SOFTMAX_TOKENS, num_tokens)

    def part() -> None:
        for _ in range(measured // SOFTMAX_CHUNK):
            torch.log_softmax(logits_CV, dim=-1)

    return clock.median(part)[0] * num_tokens / (measured // SOFTMAX_CHUNK * SOFTMAX_CHUNK)


def timing(case: Case, batch: TokenBatch, clock: Clock) -> Timing:
    rule = RULES[case.name](**case.params)
    credit_NT = group_zscore(batch.reward_N, batch.group_N)[:, None] * batch.mask_NT
    offers = {"reduce": LOCAL, "generator": seeded_generator(0, 0, "bench")}
    seen = () if rule.init is None else (call(rule, rule.start(), credit_NT, batch, **offers)[1],)
    after, peak = with_peak(lambda: call(rule, *seen, credit_NT, batch, **offers))
    after_NT, state = after if seen else (after, None)
    rule_s, done = clock.median(lambda: call(rule, *seen, credit_NT, batch, **offers))
    report, report_s = rule.report, None
    if report:
        offers |= {"state": state, **rule.settings}
        report_s, _ = clock.median(lambda: call(report, credit_NT, after_NT, batch, **offers))
    return Timing(rule_s, report_s, done, peak)


def with_peak(run: Callable[[], Any]) -> tuple[Any, int | None]:
    """The result, and the peak of resident memory during the run above what was resident before.

    Linux tells, others do not.
    """
    try:
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")  # resets the high-water mark
    except OSError:
        return run(), None
    before = resident("VmRSS")
    return run(), max(resident("VmHWM") - before, 0)


def resident(key: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def measure_case(case: Case, batch: TokenBatch, softmax_s: float, clock: Clock) -> dict[str, Any]:
    """All numbers of one case; ratios are for the whole batch."""
    num_tokens = int(batch.mask_NT.sum())
    part = batch if case.tokens is None else cut(batch, case.tokens)
    part_tokens = int(part.mask_NT.sum())
    whole, quarter, least = (
        timing(case, cut(part, part_tokens // k) if k > 1 else part, clock) for k in (1, 4, 16)
    )
    return {
        "rule": case.name,
        "params": {key: getattr(value, "func", value) for key, value in case.params.items()},
        "ratio": whole.rule_s * num_tokens / part_tokens / softmax_s,
        "report_ratio": (
            None
            if whole.report_s is None
            else whole.report_s * num_tokens / part_tokens / softmax_s
        ),
        "growth": {"x4": quarter.rule_s / least.rule_s, "x16": whole.rule_s / least.rule_s},
        "peak_mib": None if whole.peak_bytes is None else whole.peak_bytes / 2**20,
        "measured_tokens": part_tokens,
        "repeats": whole.repeats,
    }


def cut(batch: TokenBatch, num_tokens: int) -> TokenBatch:
    """The first whole groups that have ``num_tokens`` tokens; where one group has more, the first
    tokens of each of its rollouts.
    """
    width = batch.mask_NT.shape[1]
    num_rollouts = max(num_tokens // width // GROUP_SIZE, 1) * GROUP_SIZE
    part = batch.select(torch.arange(min(num_rollouts, batch.num_rollouts)))
    width = min(width, max(num_tokens // part.num_rollouts, 1))
    return part.replace(
        **{
            name: value[:, :width].contiguous()
            for name, value in vars(part).items()
            if "_NT" in name and value is not None
        }
    )


def line(row: dict[str, Any], num_tokens: int) -> str:
    label = row["rule"] + "".join(
        f" {key}={value}" for key, value in row["params"].items() if row["rule"] == "delta"
    )
    report = "" if row["report_ratio"] is None else f"{row['report_ratio']:.4f}"
    peak = "n/a" if row["peak_mib"] is None else f"{row['peak_mib']:.0f} MiB"
    part = (
        ""
        if row["measured_tokens"] == num_tokens
        else f"  (multiplied up from {row['measured_tokens']} tokens)"
    )
    growth = f"{row['growth']['x4']:8.2f}{row['growth']['x16']:8.2f}"
    return f"{label:24}{row['ratio']:10.4f}{report:>10}{growth}{peak:>12}{row['repeats']:9d}{part}"


def shares(args: argparse.Namespace, chosen: list[Case], clock: Clock) -> list[dict[str, Any]]:
    """Every rule on the rollouts of a real batch, as a share of that batch's seconds."""
    from counterpoise import method as make_method
    from counterpoise.policy import load_model
    from counterpoise.sampling import SAMPLED
    from counterpoise.tasks import task as make_task
    from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
    from counterpoise.trainer.config import parse_config
    from counterpoise.trainer.update import adamw, apply_update

    task: dict[str, Any] = {"name": "arithmetic"}
    if args.data:
        task = {
            "name": "jsonl",
            "path": args.data,
            "question": ["body", "question"],
            "answer": "answer",
            "answer_regex": "[^(]+",
        }
    rollouts = {
        "prompts": args.prompts,
        "group_size": GROUP_SIZE,
        "max_new_tokens": args.new_tokens,
    }
    config = parse_config(
        {"model": args.share_of, "task": task, "rollouts": rollouts, "optimizer": {"lr": 1e-6}}
    )
    policy = load_model(args.share_of, device="cuda" if torch.cuda.is_available() else "cpu")
    plain, grader, optimizer = (
        make_method("dapo"),
        make_task(**task),
        adamw(policy.model, config.optimizer),
    )

    def step() -> None:
        collected = collect(plain, RolloutSampler(policy, grader, config, 0, needs=plain.needs))
        credit = plain.assign(collected.batch)
        for row_R in plain.plan(collected.batch, 4):
            apply_update(
                policy.model,
                optimizer,
                plain,
                plain.rows(collected.batch, credit, row_R),
                collected,
                config,
            )

    def sampling(method: Any) -> float:
        return clock.median(
            lambda: collect(method, RolloutSampler(policy, grader, config, 0, needs=method.needs))
        )[0]

    step_s, sample_s = clock.median(step)[0], sampling(plain)
    collected, columns_s = (
        collect(plain, RolloutSampler(policy, grader, config, 0, needs=plain.needs)),
        {frozenset(): 0.0},
    )
    print(
        f"{args.share_of}: {int(collected.batch.mask_NT.sum())} response tokens, batch {step_s:.3f}"
        f" s, sampling {sample_s:.3f} s\n"
    )
    print(f"{'rule':24}{'share':>10}{'columns':>10}")
    rows = []
    for case in chosen:
        rule = RULES[case.name](**case.params)
        asking = dataclasses.replace(plain, rules=(rule,))
        taken = asking.needs & SAMPLED
        if taken not in columns_s:
            columns_s[taken] = max(sampling(asking) - sample_s, 0.0)
        batch = measure_columns(policy, asking, config, collected, policy.model).batch
        rule_s = timing(case, batch, clock).rule_s
        rows.append(
            {
                "rule": case.name,
                "params": case.params,
                "share": rule_s / step_s,
                "columns_share": columns_s[taken] / step_s,
            }
        )
        label = case.name + "".join(
            f" {key}={value}" for key, value in case.params.items() if case.name == "delta"
        )
        print(f"{label:24}{rule_s / step_s:10.2%}{columns_s[taken] / step_s:10.2%}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rules", nargs="*", default=list(RULES), choices=list(RULES), metavar="RULE"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time instead of wall time"
    )
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument(
        "--share-of", metavar="MODEL", help="shares of a training batch of this model instead"
    )
    parser.add_argument(
        "--data",
        help="a jsonl file with body, question, answer; default: the built-in arithmetic task",
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    chosen, clock = (
        cases(args.rules),
        Clock(time.process_time if args.cpu_time else now, args.repeats),
    )
    if args.share_of:
        rows = shares(args, chosen, clock)
        if args.json:
            facts = {
                "date": time.strftime("%Y-%m-%d"),
                "device": device_name(),
                "torch": torch.__version__,
                "args": vars(args),
            }
            Path(args.json).write_text(
                json.dumps({**facts, "rules": rows}, indent=1, default=str) + "\n"
            )
        return
    needs = frozenset().union(*(RULES[case.name](**case.params).needs for case in chosen))
    num_tokens = args.rollouts * args.tokens
    softmax_s, unit = (
        softmax_seconds(args.vocab, num_tokens, clock),
        "processor time" if args.cpu_time else "wall time",
    )
    shape = f"{args.rollouts} x {args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}"
    print(f"{shape}, {torch.get_num_threads()} threads, {unit}")
    print(
        f"one log-softmax: {softmax_s:.1f} s, multiplied up from {min(SOFTMAX_TOKENS, num_tokens)}"
        " tokens\n"
    )
    print(f"{'rule':24}{'ratio':>10}{'report':>10}{'x4':>8}{'x16':>8}{'peak':>12}{'repeats':>9}")
    batch = example(args.rollouts, args.tokens, args.hidden, args.vocab, needs)
    rows = []
    for case in chosen:
        rows.append(measure_case(case, batch, softmax_s, clock))
        print(line(rows[-1], num_tokens), flush=True)
    if args.json:
        header = {
            "rollouts": args.rollouts,
            "tokens": args.tokens,
            "hidden": args.hidden,
            "vocab": args.vocab,
        }
        header |= {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "clock": unit,
            "log_softmax_s": softmax_s,
        }
        header |= {"date": time.strftime("%Y-%m-%d"), "device": device_name()}
        Path(args.json).write_text(
            json.dumps({**header, "rules": rows}, indent=1, default=str) + "\n"
        )


if __name__ == "__main__":
    main()

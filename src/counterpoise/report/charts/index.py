"""The report's charts: what each shows, how to read it, and what the number is."""

from __future__ import annotations

from typing import NamedTuple

from counterpoise.report import tokens
from counterpoise.report.charts.draw import (
    Draw,
    of_cancellation,
    of_evals,
    of_flips,
    of_keys,
    of_ledger,
    of_metric,
    of_pass,
    of_positive_share,
    of_prediction,
    of_rewards,
    of_signed_bars,
    of_timing,
    of_tokens,
)
from counterpoise.report.charts.turns import of_ends, of_environment, of_turn_rewards


class Chart(NamedTuple):
    """A chart of the report.

    Attributes:
        help: one line on how to read it.
        definition: what the number is.
        draw: ``draw(groups, batch)`` gives None where the files hold nothing to draw.
        is_wide: takes the whole width of the page.
        needs: what to switch on in the recipe where the files hold nothing.
    """

    name: str
    section: str
    title: str
    help: str
    definition: str
    draw: Draw
    is_wide: bool = False
    needs: str = ""


CHARTS: tuple[Chart, ...] = (
    Chart(
        "accuracy",
        "learning",
        "Held-out accuracy",
        "The result. Prompts were never trained on; differences smaller than the band are noise.",
        "Share of held-out answers that are right: a reward of at least task.success. Band: 95%,"
        " over prompts for one run, over seeds (Student's t) for several.",
        of_evals,
        is_wide=True,
        needs="eval.every in the recipe",
    ),
    Chart(
        "reward",
        "learning",
        "Training reward",
        "Should rise; a jagged line is the noise of a small batch, a lasting fall is instability.",
        "Mean of the grader's number over all rollouts of a batch.",
        of_metric("reward/mean"),
    ),
    Chart(
        "entropy",
        "learning",
        "Policy entropy",
        "A slow fall is learning; a drop to zero means the policy stopped exploring, a climb that"
        " it falls apart.",
        "Mean over response tokens of the entropy of the sampling distribution, in nats.",
        of_metric("entropy/mean", zero=True),
    ),
    Chart(
        "length",
        "learning",
        "Response length",
        "A drift without a gain in accuracy is the reward or the reduction paying for length.",
        "Mean number of response tokens per rollout.",
        of_metric("rollouts/length"),
    ),
    Chart(
        "grad_norm",
        "learning",
        "Gradient norm",
        "Spikes come before collapses; a flat line at the clip norm means that every update is"
        " clipped.",
        "L2 norm of the gradient before clipping, mean over the updates of a batch.",
        of_metric("loss/grad_norm", zero=True),
    ),
    Chart(
        "constant_groups",
        "signals",
        "Prompts that teach nothing",
        "Prompts whose rollouts all earned the same have no advantage; near 100% there is nothing"
        " to learn.",
        "Share of rollouts whose prompt has one reward for all of its rollouts.",
        of_metric("reward/constant_group_frac", zero=True),
    ),
    Chart(
        "rewards",
        "signals",
        "Rewards",
        "Mass moves to the right while the policy learns; one bar alone leaves nothing to compare.",
        "Share of rollouts by reward, of the first and of the last batch with saved rollouts.",
        of_rewards,
        needs="save_rollouts_every in the recipe",
    ),
    Chart(
        "cut",
        "signals",
        "Answers cut off",
        "A rising share means that answers outgrow the limit: they are graded unfinished.",
        "Share of rollouts that ended at max_new_tokens instead of a stop token.",
        of_metric("rollouts/cut_frac", zero=True),
    ),
    Chart(
        "clipped",
        "signals",
        "Clipped tokens",
        "Near 0: the clip does not bind. High: updates are too large, and clipped tokens teach"
        " nothing.",
        "Share of tokens whose gradient the loss's clip took away, mean over the updates of a"
        " batch.",
        of_metric("loss/clipped_frac", zero=True),
    ),
    Chart(
        "sampler_gap",
        "signals",
        "Gap between sampler and trainer",
        "Should be small at the first update of a batch; a climb means that the sampler's"
        " log-probs are not the trainer's.",
        "Mean over tokens of |trainer log-prob - sampler log-prob|, mean over the updates of a"
        " batch.",
        of_metric("loss/sampler_gap", zero=True),
    ),
    Chart(
        "grader",
        "signals",
        "Grader failures",
        "0 is healthy: a failed grader gives no reward, and the policy learns from the others.",
        "Rollouts of a batch whose grader raised, ran out of time or gave no number.",
        of_metric("grader/num_failures", zero=True),
    ),
    Chart(
        "throughput",
        "signals",
        "Sampling speed",
        "A fall with longer answers is expected; one without is the machine.",
        "Sampled tokens per second, on the machine of the run.",
        of_timing("sample_tokens_per_s"),
    ),
    Chart(
        "pass",
        "signals",
        "pass@k",
        "Accuracy that rises while pass@k falls is sureness, not skill.",
        "Share of held-out prompts that at least one of k samples solves, without bias"
        " (arXiv 2107.03374); the largest k of the run.",
        of_pass,
        needs="eval.samples above 1",
    ),
    Chart(
        "turn_rewards",
        "turns",
        "Reward by turn",
        "Where in an episode reward is earned; learning moves it to earlier turns, or adds some.",
        "Mean reward of each turn over the rollouts that played it. Whiskers: 95% over these"
        " batches for one run, over seeds for several.",
        of_turn_rewards,
    ),
    Chart(
        "num_turns",
        "turns",
        "Turns per episode",
        "A fall is fine where the reward rises; a fall to one turn with a flat reward means that"
        " the policy gave up asking.",
        "Mean number of turns per rollout.",
        of_metric("turns/mean", zero=True),
    ),
    Chart(
        "ends",
        "turns",
        "Why episodes ended",
        "Done is the environment's own end; turns and length are limits of the recipe, failed and"
        " timed out are faults of the environment.",
        "Share of rollouts by the reason of their end. Reasons that never came are left out.",
        of_ends,
    ),
    Chart(
        "environment",
        "turns",
        "Numbers of the environment",
        "What the environment counts itself: calls of tools, malformed actions.",
        "Mean over the turns of a rollout that have the number, then over rollouts.",
        of_environment,
    ),
    Chart(
        "pairs_kept",
        "plan",
        "Pairs in one update",
        "100% means that good and bad answers to one prompt are always in the same update,"
        " where their shared tokens can cancel.",
        "Share of same-prompt (positive, negative) pairs of rollouts that one update holds"
        " together.",
        of_metric("plan/pairs_kept", zero=True),
    ),
    Chart(
        "positive_share",
        "plan",
        "Positives per update",
        "A narrow band means that updates are balanced alike; a wide one that some see mostly"
        " failures.",
        "Share of rollouts that count as solved in an update; the band runs from the least"
        " to the most positive update of a batch.",
        of_positive_share,
    ),
    Chart(
        "weight",
        "credit",
        "Token weights",
        "A spike at 1 is uniform credit; what is left or right of it is what the credit rules"
        " changed.",
        "Weight = credit / advantage, one number per token. The outermost percent is drawn in the"
        " outer bins.",
        of_tokens("weight", "weight"),
    ),
    Chart(
        "credit",
        "credit",
        "Token credit",
        "Right of 0 pushes a token up, left of 0 down; the two sides should weigh about the same.",
        "Credit: one signed number per token, what the loss gets.",
        of_tokens("credit", "credit"),
    ),
    Chart(
        "categories",
        "credit",
        "Where the credit goes",
        "Credit on template tokens teaches format; credit on numbers and reasoning words teaches"
        " the task.",
        "Share of the sum of |credit| by token category, within the tokens of one sign. Whiskers:"
        " 95% bootstrap over prompts.",
        of_signed_bars(tokens.category_mass, "share of |credit|"),
        is_wide=True,
    ),
    Chart(
        "flips",
        "ledger",
        "Flips",
        "0 would mean that every token moved as its own advantage says; what is above is other"
        " tokens winning.",
        "Share of tokens whose log-prob moved against the sign of their own advantage. Band: 95%"
        " bootstrap over prompts, or over seeds.",
        of_flips,
        is_wide=True,
    ),
    Chart(
        "changes",
        "ledger",
        "Boosted and suppressed",
        "If good and bad answers show like shares, the update does not tell them apart token by"
        " token.",
        "Share of tokens whose log-prob rose, fell, or stayed within the noise floor, by the sign"
        " of the advantage, at the last ledger batch.",
        of_signed_bars(tokens.change_shares, "share of tokens"),
    ),
    Chart(
        "predicted",
        "ledger",
        "Predicted against actual change",
        "Points on the dotted line: the first-order account explains the update, so its parts can"
        " be trusted.",
        "Predicted: first-order change of the log-prob along the update of the parameters. r:"
        " Pearson's correlation over all tokens, 95% bootstrap over prompts; points: a sample.",
        of_prediction,
    ),
    Chart(
        "cancellation",
        "ledger",
        "Cancellation by sharedness",
        "Tokens that good and bad answers share should cancel (high); tokens of one side should not"
        " (low).",
        "1 - |sum of the parts| / sum of |parts|, a part being what positive, negative or other"
        " rollouts did to the token; mean over tokens, 95% bootstrap over prompts. Shared: the same"
        " prompt, the same tokens so far, the same token.",
        of_cancellation,
        needs="ledger.decompose in the recipe",
    ),
    Chart(
        "residuals",
        "ledger",
        "Residual at shared tokens",
        "0: what good and bad answers share cancels; 1: nothing of it does. The other lines say"
        " which part of the method broke it.",
        "At a token that rollouts of both signs share: |sum of their coefficients| / sum of"
        " |coefficients| (coefficient: what multiplies the token's gradient), mean over such"
        " tokens; band: 95% bootstrap over prompts. From ...: what the residual loses with that"
        " cause off.",
        of_ledger(
            "residual",
            ("ledger/residual/full", "residual"),
            also=(
                ("ledger/residual/coupling", "from weights of the loss"),
                ("ledger/residual/clip", "from the clip"),
                ("ledger/residual/length", "from the length"),
            ),
        ),
    ),
    Chart(
        "tax",
        "ledger",
        "Learning tax",
        "Change where all answers agree teaches nothing; change at the forks is what learning is"
        " for.",
        "KL(after || before) of an update, in nats, mean over tokens by context: all rollouts of"
        " the prompt take this token; some of both signs do, and none parts; forks: they part here."
        " Band: 95% bootstrap over prompts.",
        of_ledger(
            "tax",
            ("ledger/tax/shared", "shared by all"),
            ("ledger/tax/both_signs", "shared by both signs"),
            ("ledger/tax/discriminating", "forks"),
            ("ledger/tax/other", "elsewhere"),
        ),
    ),
    Chart(
        "tax_cumulative",
        "ledger",
        "Learning tax, cumulative",
        "The steeper the shared line against the forks, the more of the training went into what no"
        " answer needed changed.",
        "The same KL summed over the updates that the ledger accounted for so far;"
        " intervals with several seeds only.",
        of_keys(
            ("ledger/tax/cumulative_shared", "shared by all"),
            ("ledger/tax/cumulative_both_signs", "shared by both signs"),
            ("ledger/tax/cumulative_discriminating", "forks"),
            ("ledger/tax/cumulative_other", "elsewhere"),
        ),
    ),
    Chart(
        "drift",
        "ledger",
        "Solution drift",
        "How far the preference among equally correct solutions has moved. A method that only"
        " removes errors stays near 0; a walk without direction rises too.",
        "Mean over a frozen bank of prompts of |change of the log-odds between two verified"
        " solutions| since they were first scored; intervals with several seeds only.",
        of_keys(("ledger/drift/log_odds_change", "log-odds change")),
        needs="ledger.bank in the recipe, and prompts with two verified solutions",
    ),
    Chart(
        "drift_slope",
        "ledger",
        "Solution drift: does the favourite gain?",
        "Above 0 the solution that was more likely at the start gains (sharpening); 0: the moves"
        " have no such direction.",
        "Slope, over a frozen bank of prompts, of the change of the log-odds between two verified"
        " solutions against their log-odds when first scored: 0.5 means that all log-odds grew by"
        " half. Intervals with several seeds only; metrics.jsonl has that of one run over prompts.",
        of_keys(("ledger/drift/slope", "slope")),
        needs="ledger.bank in the recipe, and three prompts with two verified solutions",
    ),
    Chart(
        "shared_entropy",
        "ledger",
        "Entropy of common and single tokens",
        "Where entropy falls at common tokens, the policy stops exploring without need.",
        "Mean entropy of the policy, in nats, at tokens where two or more rollouts with an"
        " advantage run together (common) and at the others. Band: 95% bootstrap over prompts.",
        of_ledger(
            "entropy", ("ledger/entropy/common", "common"), ("ledger/entropy/single", "single")
        ),
    ),
)

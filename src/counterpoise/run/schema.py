"""The run folder, the contract between training and everything that reads it: its files, their
columns, their version. Reads and writes nothing itself; the writer is ``run.write``, the reader
``run.read``.

Files (batches are counted from 0), and where each carries the schema version::

    config.yaml                      the recipe          a comment in the first line
    manifest.json                    versions, commit, command, device, seed     key schema_version
    metrics.jsonl                    one row per batch, the same on every machine    key, every row
    timing.jsonl                     one row per batch: seconds, tokens per second   key, every row
    evals.jsonl                      one row per evaluation                          key, every row
    evals/batch_000012.parquet       samples of the evaluation after 12 batches, as rollouts/
    rollouts/batch_000012.parquet    one row per rollout       file metadata counterpoise_schema
    tokens/batch_000012.parquet      one row per token (and pass): the ledger   the same metadata
    plan/batch_000012.json           rows of each update                       key schema_version
    checkpoints/batch_000012/        the state before batch 12               key in state.json

A row of a jsonl file without the key is of version 1."""

from __future__ import annotations

SCHEMA_VERSION = 3
SAME_FILES = (2, 3)  # versions that differ in names of the ledger alone
TABLES = ("rollouts", "tokens")  # folders of a table per batch
INSIDE_TRL = "counterpoise"  # the run folder in the output folder of a training inside TRL
TABLE_VERSION = b"counterpoise_schema"  # the key in a table's metadata

# version 1 called batches and updates "steps" (files step_*) and took some names from prime-rl.
# Names of version 1 -> names now: columns of tables, keys of jsonl rows and of plans
RENAMED_COLUMNS = {
    "step": "batch",
    "optimizer_step": "update",
    "advantages": "credit",
    "weights": "weight",
    "inference_logprobs": "sampler_logp",
    "trainer_logprobs": "trainer_logp",
    "trainer_logprobs_after": "trainer_logp_after",
    "importance_ratio": "ratio",
    "optimizer/num_steps": "optimizer/num_updates",
}
# version 2 called the head's part of a token's own change "own", and predicted minus that
# "coupling" (mostly the own part below the head: it is not read), and "shared" meant two things
RENAMED_LEDGER_COLUMNS = {"own": "own_head"}
LEFT_OUT_COLUMNS = ("coupling",)
RENAMED_LEDGER_KEYS = {
    "ledger/entropy/shared": "ledger/entropy/common",
    "ledger/entropy/other": "ledger/entropy/single",
}
# version -> names of keys in jsonl rows and plans
RENAMED_KEYS = {1: {**RENAMED_COLUMNS, **RENAMED_LEDGER_KEYS}, 2: RENAMED_LEDGER_KEYS}
RENAMED_TOKEN_COLUMNS = {**RENAMED_COLUMNS, **RENAMED_LEDGER_COLUMNS, "token_ids": "token_id"}
RENAMED_CONFIG_KEYS = {
    "num_steps": "num_batches",
    "optimizer.steps_per_batch": "optimizer.updates_per_batch",
}


# why a conversation ended -> in words
END_REASONS = {
    "done": "the environment ended it",
    "turns": "at max_turns",
    "length": "at max_new_tokens or max_row_tokens",
    "failed": "the environment failed",
    "timed out": "the environment took too long",
}

# rollouts/batch_*.parquet, one row per rollout; the last six are lists, one entry per token after
# the prompt
ROLLOUT_COLUMNS = {
    "batch": "batch, counted from 0",
    "rollout": "number of the rollout in its batch",
    "group": "number of the prompt in its batch",
    "prompt_id": "the task's name for the prompt",
    "prompt": "text of the prompt",
    "answer": "the task's reference answer",
    "text": "text of the response",
    "reward": "the grader's number",
    "advantage": "one signed number per rollout",
    "stop_reason": "stop (a stop token came) or length (the limit was reached)",
    "prompt_ids": "token ids of the prompt as the model read it",
    "token_ids": "token ids of the response",
    "loss_mask": "True on response tokens that take part in the loss",
    "credit": "one signed number per token: what the loss gets",
    "weight": "credit / advantage",
    "sampler_logp": "sampler log-prob of the token",
    "entropy": "entropy of the sampling distribution at the token, nats",
}

# and beside them where the grader says something of an answer
FEEDBACK_COLUMNS = {
    "feedback": (
        "what the grader says of the answer, e.g. a line for each test that fails; empty where it"
        " says nothing"
    )
}

# and beside them where something else than the sum of rewards decides what counts as solved (inside
# TRL ``success_reward``); without it a reward of at least ``task.success`` does
SUCCESS_COLUMNS = {"success": "True where the rollout counts as solved, by the named reward"}

# and beside them where the trainer scored the rollouts before its first update: for methods that
# read it, and in batches with a ledger
TRAINER_COLUMNS = {
    "trainer_logp": "log-prob of the token under the trainer, before the first update"
}

# and beside them where a method measures the value of prefixes (vine_ppo, spo_chain)
VALUE_COLUMNS = {
    "segment": "one entry per token: the segment that it belongs to, counted from 0; -1 is none",
    "value": "one entry per token: mean reward of fresh completions from where its segment begins",
}

# and beside them where the task is an environment; evals/batch_*.parquet has all but turn_advantage
TURN_COLUMNS = {
    "turn": (
        "one entry per token: the turn in which the model wrote it, counted from 0; -1 on tokens"
        " of the environment"
    ),
    "turn_reward": "one entry per turn, as in all that follow: its reward; they add up to reward",
    "turn_score": "the environment's score of the state after it, NaN where it gives none",
    "turn_advantage": "signed number of each turn; the rollout's where no rule tells turns apart",
    "turn_state": "the environment's name of the state before the turn, empty where it gives none",
    "turn_key": "number of that state; equal numbers in a prompt mean equal states",
    "turn_action": "what the model wrote, as the environment read it",
    "turn_reply": "what the environment answered; may lack the last",
    "end_reason": f"one of {', '.join(END_REASONS)}",
    "failure": (
        "what failed, empty where nothing did; rollouts whose environment failed come last and have"
        " no credit"
    ),
}

# tokens/batch_*.parquet, one row per response token (the ledger)
TOKEN_COLUMNS = {
    "batch": "batch, counted from 0",
    "update": (
        "which update of the batch trained this token, counted from 0 and on over epochs (a row"
        " each); null if the plan left its rollout out"
    ),
    "group": "number of the prompt in its batch",
    "rollout": "number of the rollout in its batch",
    "position": "position in the response, counted from 0",
    "token_id": "token id",
    "text": "the token's text",
    "loss_mask": "True: takes part in the loss",
    "reward": "the rollout's reward",
    "advantage": "the rollout's advantage",
    "sign": "+1, 0 or -1: sign of the advantage of the token's turn, else of its rollout",
    "weight": "credit / advantage",
    "credit": "one signed number per token: what the loss got",
    "coef": "minus the derivative of the token's loss by its own log-prob",
    "scale": (
        "the reduction's factor; coef * scale is the coefficient of the token's gradient in the"
        " update"
    ),
    "is_clipped": "the loss was on its clipped side: coef 0 although credit is not",
    "ratio": "exp(trainer - sampler log-prob) before the update",
    "sampler_logp": "sampler log-prob",
    "sampler_gap": "trainer - sampler log-prob before the first update, where it was measured",
    "trainer_logp": "log-prob just before the update",
    "trainer_logp_after": "log-prob just after the update, same forward",
    "delta": "change of the log-prob by the update",
    "noise_floor": "largest change seen when scoring twice without an update",
    "change": "boosted, suppressed, or unchanged (|delta| within the noise floor)",
    "is_flip": "moved against the sign of its own advantage",
    "entropy": "entropy of the policy at the token, nats",
    "confidence": "probability of the token under the sampler",
    "category": "template, connective, number, operator, reasoning or other",
    "node": "shared-node id: equal for the same (prompt, prefix, token)",
    "node_positive": "rollouts with positive advantage that share the node",
    "node_negative": "rollouts with negative advantage that share the node",
    "is_fully_shared": "every rollout of the prompt is at this context and takes this token",
    "is_fork": (
        "rollouts of both signs are at this context and not all take the same token (a"
        " discriminating context)"
    ),
    "kl": "KL(after || before) of the distribution at the token's context, nats",
    "predicted": "first-order change along the actual parameter difference",
    "own_head": (
        "the part of the predicted change that the token's own gradient brought through the head's"
        " weights alone (closed form, every token)"
    ),
    "own": (
        "the part of the predicted change that the token's own gradient brought, through all"
        " parameters; for a sample of tokens (ledger.own_tokens), null elsewhere"
    ),
    "others": (
        "predicted minus own, where own is known: what other tokens and the optimizer's memory"
        " brought"
    ),
    "cancellation": (
        "1 - |sum of the classes' parts| / sum of |parts|, classes of the first decomposition"
    ),
}
# and beside them where rollouts have turns
TOKEN_TURN_COLUMNS = {
    "turn": "the turn in which the model wrote the token, counted from 0",
    "turn_advantage": "the advantage of that turn, whose sign is `sign`",
}
# and beside them what the method's rules read, where it was measured for them
TOKEN_READ_COLUMNS = {
    "value": "mean reward of fresh completions from where the token's segment begins",
    "teacher_gap": "teacher - sampler log-prob; null where the rollout has no teacher",
    "importance": "the token's influence on the answer; null where it has none",
}
# further columns part_<axis>_<class>, e.g. part_sign_positive: the class's part of the predicted
# change; part_<axis>_rest: what the optimizer's memory (momentum, weight decay) brought. The parts
# of an axis add up to predicted.
PART_PREFIX = "part_"
REST = "rest"

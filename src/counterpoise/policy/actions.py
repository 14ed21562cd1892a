"""How likely a model plays each action of a game after each history.

Axes: H histories, A actions, N rows (a history with an action), T tokens of an action.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.checks import pad_rows
from counterpoise.environments.values import STOP, Tree, transcript
from counterpoise.policy.load import Policy
from counterpoise.policy.logp import token_logp
from counterpoise.types import Prompt


@torch.no_grad()
def action_probabilities(
    policy: Policy, prompt: Prompt, tree: Tree, *, temperature: float = 1.0, max_rows: int = 4096
) -> Tensor:
    """``probability_HA`` of a model that reads plain text and ends a turn with its stop token.

    Args:
        policy: a model with a token per character, as those of the built-in games.
        tree: the histories and actions.
        max_rows: rows of one forward.
    """
    texts = [transcript(prompt, history) for history in tree.histories]
    history_ids = _ids(policy, texts)
    action_ids = _ids(policy, [action + STOP for action in tree.actions])
    lengths = [len(ids) for ids in action_ids]
    token_ids_AT = pad_rows(action_ids, lengths, max(lengths), torch.long, "actions")
    mask_AT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    parts = []
    for some in torch.arange(len(texts)).split(max(1, max_rows // len(action_ids))):
        logp_NT = token_logp(
            policy.model,
            [history_ids[at] for at in some.tolist() for _ in action_ids],
            token_ids_AT.repeat(len(some), 1),
            mask_AT.repeat(len(some), 1),
            temperature=temperature,
        )
        parts.append(logp_NT.sum(1).double().exp().view(len(some), -1).cpu())
    return torch.cat(parts)


def _ids(policy: Policy, texts: list[str]) -> list[list[int]]:
    return policy.tokenizer(texts, add_special_tokens=False)["input_ids"]

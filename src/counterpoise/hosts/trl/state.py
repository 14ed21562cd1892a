"""What a method carries from generation to generation (FADE's running means, the count of
generations), in TRL's checkpoints.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class CreditState(TrainerCallback, ExportableState):
    """Saved in ``trainer_state.json`` and read back on resume.

    A resumed run reads it whether or not ``restore_callback_states_from_checkpoint`` is set: a
    controller that starts anew would change the training. TRL generates anew when it resumes
    between the updates of one generation; that counts as a generation."""

    def __init__(self) -> None:
        self.generation = 0
        self.method_state: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {
            "args": {},
            "attributes": {"generation": self.generation, "method_state": self.method_state},
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = (state.stateful_callbacks or {}).get(type(self).__name__)
        for name, value in (saved or {}).get("attributes", {}).items():
            setattr(self, name, value)


def credit_state(trainer: Any) -> CreditState:
    """The trainer's; looked up each time, because a resuming Trainer puts new callbacks in place of
    the old ones.
    """
    return next(
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, CreditState)
    )

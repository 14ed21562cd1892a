"""What a method carries from batch to batch (FADE's running means, the number of batches), in TRL's
checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin


class CreditState(TrainerCallback, ExportableState):
    """Saved in ``trainer_state.json`` and read back on resume.

    A resumed run reads it whether or not ``restore_callback_states_from_checkpoint`` is set: a
    controller that starts anew would change the training. TRL generates anew when it resumes
    between the updates of one batch; that counts as a batch.
    """

    def __init__(self) -> None:
        self.num_batches = 0
        self.method_state: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        return {
            "args": {},
            "attributes": {"num_batches": self.num_batches, "method_state": self.method_state},
        }

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        callbacks: Any = state.stateful_callbacks or {}
        saved = callbacks.get(type(self).__name__) or {}
        for name, value in saved.get("attributes", {}).items():
            setattr(self, name, value)


def credit_state(trainer: CreditMixin) -> CreditState:
    """The trainer's; looked up each time, because a resuming Trainer puts new callbacks in place of
    the old ones.
    """
    return next(
        callback
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, CreditState)
    )

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    max_tokens: int = 16
    logprobs: int | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        filters = (self.repetition_penalty, self.top_p, self.top_k, self.min_p, self.logprobs)
        if filters != (1.0, 1.0, 0, 0.0, 0):
            raise NotImplementedError(
                "SamplingParams: the stand-in has no penalty, top_p, top_k and min_p, and gives"
                f" the log-prob of the drawn token (logprobs=0), got {self}."
            )


class StructuredOutputsParams:
    """TRL imports the name."""

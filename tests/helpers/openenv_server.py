"""A server of OpenEnv for the tests: guess a digit. Its first argument is the port; a second one
makes it ignore seeds.
"""

from __future__ import annotations

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class Digits(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs) -> Hint:
        self.secret = random.Random(None if len(sys.argv) > 2 else seed).randrange(10**6)
        return Hint(text=f"Guess the last digit of my number, which begins {self.secret // 10}.")

    def step(self, action: Guess, timeout_s=None, **kwargs) -> Hint:
        is_hit = action.message == str(self.secret % 10)
        text = "yes" if is_hit else "no"
        return Hint(text=text, reward=1.0 if is_hit else None, done=is_hit)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Digits, Guess, Hint, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")

"""Python functions as tools of a task: the model calls them in its turns, then answers.

A turn whose last line is a call, ``calculator("3 * 14")``, gets the result as its reply. A turn
without a call is the answer, which the task grades. A call has literal arguments alone and is
parsed, never evaluated. What goes wrong in a call is text for the model.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from counterpoise.environments import Reply
from counterpoise.errors import check_number, check_whole, import_path
from counterpoise.tasks import task as make_task
from counterpoise.types import Prompt

Tool = Callable[..., object]
INSTRUCTION = (
    "{question}\n\nYou may call these functions. To call one, end your message with a line that is"
    " the call alone, with its arguments written out, and read its result. A message without a call"
    " is your answer.\n{tools}"
)
OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """The value of an arithmetic expression with + - * / // % and parentheses.

    >>> calculator("(3 + 4) * 2 / 7")
    '2.0'
    """
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # pyright: ignore[reportReturnType]
    kind = OPERATORS.get(type(getattr(node, "op", None)))
    if isinstance(node, ast.BinOp) and kind is not None:
        return kind(_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and kind is not None:
        return kind(_value(node.operand))
    raise ValueError(f"expected numbers and + - * / // % ( ), got {ast.unparse(node)}")


BUILT_IN: dict[str, Tool] = {"calculator": calculator}


class Tools:
    """A task whose questions may be worked out with tools.

    Args:
        task: its name, or a mapping with its name and parameters; it gives questions and grades.
        tools: ``calculator``, import paths ``your.module:function``, or functions; each with type
            hints and a docstring, which the model reads.
        cost: of each call.
        max_characters: of a result; what is longer is cut.

    >>> environment = Tools("arithmetic", ["calculator"])
    >>> prompt = next(environment.prompts("test", seed=0))
    >>> episode = environment.start(prompt, seed=0)
    >>> episode.step('I compute it.\\ncalculator("7 - 3")').text
    '4'
    >>> episode.step(f"So the answer is {prompt.answer}.")[1:3]
    (1.0, True)
    """

    def __init__(
        self,
        task: str | Mapping[str, Any],
        tools: Sequence[str | Tool],
        *,
        cost: float = 0.0,
        max_characters: int = 2000,
    ) -> None:
        check_number("tools", least=0, cost=cost)
        check_whole("tools", least=1, max_characters=max_characters)
        self.task = make_task(task)
        if not hasattr(self.task, "reward"):
            raise ValueError(f"tools: task {task!r} is an environment. Give a task with a grader.")
        self.tools = {tool.__name__: tool for tool in map(_tool, tools)}
        if not self.tools:
            raise ValueError("tools: no tools. Give at least one, for example [calculator].")
        self.cost, self.max_characters = cost, max_characters

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The task's own questions, each with what the tools are."""
        for prompt in self.task.prompts(split, seed, start):
            meta = {**prompt.meta, "question": prompt.text}
            yield prompt._replace(text=self._text(prompt.text), meta=meta)

    def _text(self, question: str) -> str:
        parts = "\n".join(
            f"{signature(tool)}: {inspect.getdoc(tool)}" for tool in self.tools.values()
        )
        return INSTRUCTION.format(question=question, tools=parts, example='calculator("6 * 7")')

    def start(self, prompt: Prompt, seed: int) -> _Episode:
        return _Episode(self, prompt._replace(text=prompt.meta["question"]))


class _Episode:
    def __init__(self, environment: Tools, prompt: Prompt) -> None:
        self.environment, self.prompt = environment, prompt

    def step(self, action: str) -> Reply:
        environment = self.environment
        call = call_of(action, environment.tools)
        if call is None:
            reward = float(environment.task.reward(self.prompt, action))
            return Reply(reward=reward, is_done=True, metrics={"tool_calls": 0.0})
        text, is_error = result_of(call, environment.tools)
        metrics = {"tool_calls": 1.0, "tool_errors": float(is_error)}
        return Reply(text[: environment.max_characters], -environment.cost, metrics=metrics)


def signature(tool: Tool) -> str:
    """How a tool is called.

    >>> signature(calculator)
    'calculator(expression: str) -> str'
    """
    hints = inspect.signature(tool, eval_str=True)
    return f"{tool.__name__}{hints}"


def call_of(action: str, tools: Mapping[str, Tool]) -> ast.Call | None:
    """The call in the last line of a turn, None if that is no call of a tool."""
    line = action.strip().rpartition("\n")[2].strip()
    try:
        node = ast.parse(line, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node if is_call and node.func.id in tools else None  # pyright: ignore


def result_of(call: ast.Call, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    """What a tool says, and whether that is an error.

    >>> result_of(call_of("calculator(1, 2)", BUILT_IN), BUILT_IN)
    ('error: too many positional arguments', True)
    """
    tool = tools[ast.unparse(call.func)]
    try:
        args = [ast.literal_eval(one) for one in call.args]
        named = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        inspect.signature(tool).bind(*args, **named)
        return str(tool(*args, **named)), False
    except Exception as error:
        return f"error: {str(error).strip() or type(error).__name__}".splitlines()[0], True


def _tool(tool: str | Tool) -> Tool:
    function = tool if callable(tool) else BUILT_IN.get(tool) or import_path(tool, "tools")
    hints = inspect.signature(function).parameters if inspect.isfunction(function) else {}
    is_typed = all(one.annotation is not inspect.Parameter.empty for one in hints.values())
    if not inspect.isfunction(function) or not is_typed or not inspect.getdoc(function):
        raise ValueError(
            f"tools: {tool!r} is no tool. Expected a function with type hints and a docstring."
        )
    return function

"""Write the generated pages of docs/: the recipe, the columns, the command line, the methods, the
Python names.

python scripts/make_reference.py            write them
python scripts/make_reference.py --check    exit with 1 if one is not current
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import counterpoise as cp
from counterpoise.catalogue.registry import FAMILIES
from counterpoise.cli import COMMANDS
from counterpoise.run import schema
from counterpoise.trainer.config import Config

DOCS = Path(__file__).parents[1] / "docs"
NOTE = (
    "<!-- Written by scripts/make_reference.py: edit the source that it reads, not this page. -->"
)
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table.

    >>> table(["a", "b"], [["1", "x | y"]]).splitlines()[-1]
    '| 1 | x \\\\| y |'
    """
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in row) + " |"
        for row in lines
    )


def sentences(text: str) -> str:
    """Prose, one sentence per line.

    >>> sentences("One. Two\\nthree.")
    'One.\\nTwo three.'
    """
    return re.sub(r"(?<=\.) (?=[A-Z`])", "\n", " ".join(text.split()))


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTE, *(part for part in parts if part)]) + "\n"


# the recipe


def recipe_page() -> str:
    """Every key of a recipe: type, default, description, read from ``trainer.config``."""
    plain = {name: field for name, field in Config.model_fields.items() if not section_of(field)}
    parts = [
        "A recipe is a YAML file.\n"
        "It is checked before a model is loaded: an unknown key is an error that names the nearest"
        " known one.\n"
        "`counterpoise train recipe.yaml --set optimizer.lr=1e-5` overrides single keys; values"
        " are YAML.",
        "```yaml\n" + (DOCS.parent / "recipes" / "demo.yaml").read_text().strip() + "\n```",
        "## Top level",
        fields_table("", plain),
    ]
    for name, field in Config.model_fields.items():
        if section := section_of(field):
            parts += [f"## {name}", sentences(inspect.getdoc(section) or "")]
            parts += ["Off unless the section is there."] * (field.default is None)
            parts += [fields_table(f"{name}.", section.model_fields)]
    return page("Recipe", *parts)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    kinds = (field.annotation, *get_args(field.annotation))
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)


def fields_table(prefix: str, fields: dict[str, FieldInfo]) -> str:
    rows = [
        [
            f"`{prefix}{name}`",
            type_of(field),
            default_of(field),
            " ".join((field.description or "").split()),
        ]
        for name, field in fields.items()
    ]
    return table(["key", "type", "default", "meaning"], rows)


def type_of(field: FieldInfo) -> str:
    kind = field.annotation
    text = getattr(kind, "__name__", "") if isinstance(kind, type) else ""
    text = str(kind) if not text or get_args(kind) else text
    text = text.replace("typing.", "").replace("NoneType", "null").replace("None", "null")
    text = re.sub(r"Literal\[(.*?)\]", lambda m: m[1].replace("'", "").replace(", ", " or "), text)
    bounds = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(rule, name)
    ]
    text = text.replace("dict[str, Any]", "mapping").replace("|", "or")
    return ", ".join([text, *bounds])


def default_of(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if value is None or isinstance(value, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[value] }`"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return "a text" if "\n" in text else f"`{text}`".replace("'", "")


# the columns


def columns_page() -> str:
    """The columns of the run folder's tables, read from ``run.schema``."""
    parts = [
        "A run folder is the only thing that the report, the viewer, the probes and a notebook"
        " read.\n`cp.load_run(RUN)` opens it.",
        "## Files",
        files_text(),
        "## rollouts/batch_*.parquet",
        "One row per rollout.\nThe columns from `token_ids` on are lists with one entry per"
        " response token.",
        column_table(schema.ROLLOUT_COLUMNS),
        "Where the grader says something of an answer, as [tests of code](../guides/code.md) do:",
        column_table(schema.FEEDBACK_COLUMNS),
        "Where a reward function that was named says [what counts as success]"
        "(../guides/success.md), inside TRL `success_reward`:",
        column_table(schema.SUCCESS_COLUMNS),
        "Where a method [values prefixes](../methods/prefix_value.md) by fresh completions:",
        column_table(schema.VALUE_COLUMNS),
        "Where the trainer scored the rollouts before its first update (methods that read it, and"
        " batches with a ledger) there is also:",
        column_table(schema.TRAINER_COLUMNS),
        "Where the task is an [environment](../guides/own_task.md) the lists hold its tokens too,"
        " with `loss_mask` False and 0 for every number, and there are further columns:",
        column_table(schema.TURN_COLUMNS),
        "## tokens/batch_*.parquet",
        "The [ledger](../guides/ledger.md): one row per response token.",
        column_table(schema.TOKEN_COLUMNS),
        "Where rollouts have turns:",
        column_table(schema.TOKEN_TURN_COLUMNS),
        "Where something was measured for the method's rules (`vine_ppo`, `spo_chain`; teachers;"
        " `oar`):",
        column_table(schema.TOKEN_READ_COLUMNS),
        f"Further columns `{schema.PART_PREFIX}<axis>_<class>`, for example `part_sign_positive`,"
        " hold the part of the predicted change that each class of tokens brought.\n"
        f"`{schema.PART_PREFIX}<axis>_rest` is what the optimizer's memory (momentum, weight decay)"
        " brought.\nThe parts of an axis add up to `predicted`.",
    ]
    old = [[f"`{name}`", f"`{new}`"] for name, new in schema.RENAMED_COLUMNS.items()]
    parts += [
        "## Folders of version 1",
        "They still open.\nThe reader translates their names:",
        table(["version 1", f"version {schema.SCHEMA_VERSION}"], old),
        "## Folders of versions 1 and 2",
        "Their token tables have `own` where it is `own_head` now: the part through the head alone."
        "\nTheir `coupling` (predicted minus that) was mostly the token's own part below the head;"
        " it is not read.\nNumbers that have another name now:",
        table(
            ["versions 1 and 2", f"version {schema.SCHEMA_VERSION}"],
            [[f"`{name}`", f"`{new}`"] for name, new in schema.RENAMED_LEDGER_KEYS.items()],
        ),
    ]
    return page("Run folder: files and columns", *parts)


def files_text() -> str:
    """The list of files in the schema's docstring, as a block, with the version."""
    block = re.search(r"::\n\n((?:    .*\n)+)", schema.__doc__ or "")
    assert block, "run/schema.py: no list of files in the docstring"
    return (
        f"Batches are counted from 0; the schema version is {schema.SCHEMA_VERSION}.\n"
        "The last column says where a file carries it.\n\n"
        f"```text\n{inspect.cleandoc(block[1])}\n```"
    )


def column_table(columns: dict[str, str]) -> str:
    rows = [[f"`{name}`", text.replace("|", r"\|")] for name, text in columns.items()]
    return table(["column", "meaning"], rows)


# the command line


def cli_page() -> str:
    """Every command with its arguments, options and example, read from typer."""
    commands = [
        [f"[`{name}`](#{name})", text, f"`counterpoise[{extra}]`"]
        for name, (text, extra) in COMMANDS.items()
    ]
    parts = [
        "`counterpoise COMMAND --help` prints the same.\n"
        "A mistake is one line on stderr and exit code 2.",
        table(["command", "what it does", "install"], commands),
    ]
    for name in COMMANDS:
        parts += command_parts(name)
    return page("Command line", *parts)


def command_parts(name: str) -> list[str]:
    word = f"{name}_" if name in ("eval", "import") else name
    app = typer.Typer(add_completion=False)
    app.command(name=name)(getattr(importlib.import_module(f"counterpoise.cli.{word}"), word))
    command = typer.main.get_command(app)
    text, _, example = inspect.cleandoc(command.help or "").partition("Example:")
    rows = [option_row(param) for param in command.params if param.name != "help"]
    usage = " ".join(["counterpoise", name, *(usage_of(param) for param in command.params)])
    example = " ".join(example.strip().strip("`").split())
    shown = f"# {' '.join(usage.split())} [OPTIONS]\n{example}".strip()
    return [
        f"## {name}",
        sentences(text),
        f"```bash\n{shown}\n```",
        table(["argument or option", "default", "meaning"], rows) if rows else "",
    ]


def usage_of(param: Any) -> str:
    if param.param_type_name != "argument":
        return ""
    text = param.name.upper().rstrip("_") + ("..." if param.nargs == -1 else "")
    return text if param.required else f"[{text}]"


def option_row(param: Any) -> list[str]:
    is_argument = param.param_type_name == "argument"
    names = param.name.upper().rstrip("_") if is_argument else ", ".join(param.opts)
    default = param.default
    shown = "required" if param.required else "" if default is None or default is False else default
    shown = f"`{shown}`" if shown not in ("", "required") else shown
    return [f"`{names}`", str(shown), " ".join((param.help or "").split())]


# the methods


def methods_page() -> str:
    """The six axes with their stages and every published method, read from ``cp.methods()``."""
    axes = [[axis, question, stages(axis)] for axis, question in QUESTIONS.items()]
    head = ["method", "advantage", "credit", "loss", "reduction", "plan", "reference"]
    rows = [method_row(name, info) for name, info in cp.methods().items()]
    parts = [
        "Every published method is a point on six axes.\nA preset is a name for the point; any"
        " axis of it can be changed:",
        '```python\nimport counterpoise as cp\n\nmethod = cp.method("dapo",'
        ' plan="query_preserved", credit=[cp.credit.top_entropy(fraction=0.2)])\n```',
        "`counterpoise methods` prints the table below, `counterpoise methods delta` one method"
        " with all its parameters.\n[Which method should I use](../guides/choose.md) says how to"
        " decide, and [the arena](../results/arena.md) how they did here.",
        "## The six axes",
        table(["axis", "question", "stages"], axes),
        "## The methods",
        table(head, rows),
        "## Stages without a preset",
        other_pages(),
    ]
    return page("Methods", *parts)


QUESTIONS = {
    "advantage": "one number per rollout",
    "credit": "how that number is spread over tokens (a chain of rules)",
    "loss": "shape of ratio and clip, per token",
    "reduction": "the denominator, over the whole update",
    "plan": "which rollouts share an update",
    "controller": "state over batches that sets parameters",
}


def stages(axis: str) -> str:
    return ", ".join(f"`{name}`" for name in FAMILIES[axis])


def method_row(name: str, info: dict[str, Any]) -> list[str]:
    axes, own = info["axes"], page_of(name)
    credit = " + ".join(map(stage_text, axes["credit"])) or "uniform"
    advantage = stage_text(axes["advantage"])
    if axes["controller"]:
        advantage += f"; {axes['controller']['name']} controller"
    loss = " + ".join(map(stage_text, axes["loss"]))
    linked = f"[`{name}`]({own})" if own else f"`{name}`"
    last = [stage_text(axes["reduction"]), stage_text(axes["plan"]), info["reference"]]
    return [linked, advantage, credit, loss, *last]


def stage_text(stage: dict[str, Any]) -> str:
    params = ", ".join(f"{key} {value}" for key, value in stage.items() if key != "name")
    return stage["name"] + (f" ({params})" if params else "")


def page_of(name: str) -> str | None:
    """The page about a method: its own, else one that makes it, else one that names it."""
    pages = [page for page in sorted((DOCS / "methods").glob("*.md")) if page.stem != "index"]
    own = [page.name for page in pages if page.stem == name]
    made = [page.name for page in pages if f'cp.method("{name}"' in page.read_text()]
    named = [page.name for page in pages if f"`{name}`" in page.read_text()]
    return next(iter(own + made + named), None)


def other_pages() -> str:
    """Links to the pages of stages that no preset has."""
    linked = {page_of(name) for name in cp.methods()} | {"index.md"}
    pages = [page for page in sorted((DOCS / "methods").glob("*.md")) if page.name not in linked]
    titles = [page.read_text().splitlines()[0].removeprefix("# ") for page in pages]
    return "\n".join(f"- [{title}]({page.name})" for title, page in zip(titles, pages))


PAGES = {
    "reference/recipe.md": recipe_page,
    "reference/columns.md": columns_page,
    "reference/cli.md": cli_page,
    "methods/index.md": methods_page,
}


def main() -> int:
    stale = [name for name, make in PAGES.items() if not is_current(name, make())]
    if "--check" in sys.argv:
        print(f"not current: {', '.join(stale)}. Run: make docs" if stale else "all pages current")
        return int(bool(stale))
    for name in stale:
        (DOCS / name).write_text(PAGES[name]())
        print(f"wrote docs/{name}")
    return 0


def is_current(name: str, text: str) -> bool:
    file = DOCS / name
    return file.is_file() and file.read_text() == text


if __name__ == "__main__":
    sys.exit(main())

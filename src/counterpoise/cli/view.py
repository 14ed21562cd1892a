"""``counterpoise view``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoise.cli.show import Json, print_json, say, waiting
from counterpoise.run.find import check_run, runs_below

if TYPE_CHECKING:
    from counterpoise.run.read import RunFolder


def view(
    run: Annotated[
        Path,
        typer.Argument(help="A run folder, or a folder that holds several: then all are listed."),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="On 127.0.0.1; 0 takes a free one.")
    ] = 0,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser.")] = True,
    export: Annotated[
        Path | None,
        typer.Option(help="Write a page with the tokens inside to this folder instead of serving."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Batches to export; the last one with tokens by default."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Export only the first so many prompts of a batch.")
    ] = None,
    json_: Json = False,
) -> None:
    """Look at the tokens of a run in a browser.

    The rollouts of a prompt stand side by side, coloured by credit, change, entropy, cancellation.
    Serves the run folder on this machine alone until Ctrl-C.

    Example: `counterpoise view runs/demo`
    """
    if export is not None or not runs_below(run):
        check_run(run)
    from counterpoise.run.read import open_run

    if export is not None:
        from counterpoise.viewer.export import write_export

        with waiting("exporting tokens"):
            folder = open_run(run)
            batches = batch or last_batches(folder)
            page = write_export(folder, export, batches, prompts)
        print_json({"page": str(page)}) if json_ else say(f"Open {page}")
        return
    if batch or prompts:
        raise ValueError(
            "view: --batch and --prompts go with --export. Without it, choose the batch on the"
            " page."
        )
    from counterpoise.viewer.server import serve

    serve(run, port, ready=lambda address: _announce(address, open_, json_))


def last_batches(run: RunFolder) -> list[int]:
    """The last batch with a ledger, else the last one with rollouts; ValueError without any."""
    known = run.batches("tokens") or run.batches("rollouts")
    if not known:
        raise ValueError(f"view --export: {run.name!r} has no tokens and no rollouts to show.")
    return known[-1:]


def _announce(address: str, in_browser: bool, json_: bool) -> None:
    import webbrowser

    print(f'{{"address": "{address}"}}' if json_ else f"{address}  (Ctrl-C stops it)", flush=True)
    if in_browser:
        webbrowser.open(address)

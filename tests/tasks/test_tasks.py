"""Tasks: streams that can be resumed anywhere, splits that never mix, graders that look at the
answer, clear errors, exact gradients.
"""

from __future__ import annotations

import json
import pickle
import random
from itertools import islice

import pytest
import torch

from counterpoise.tasks import grade, task
from counterpoise.tasks.arithmetic import Arithmetic, demonstration
from counterpoise.tasks.gym import Gym
from counterpoise.tasks.jsonl import Jsonl, equal_answers
from counterpoise.tasks.workers import POOL
from counterpoise.types import Prompt
from helpers.tabular import Tabular, TabularPolicy, all_strings, expected_reward, reward_table

ROWS = [
    {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
    for n in range(100)
]


@pytest.fixture(autouse=True, scope="module")
def _stop_workers():
    yield
    POOL.close()


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def gsm(tmp_path) -> Jsonl:
    return Jsonl(write(tmp_path / "gsm.jsonl", ROWS), answer_after="####")


def some_tasks(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    return [
        Arithmetic(),
        Jsonl(path, answer_after="####"),
        Gym("chain_sum"),
        Tabular("abc", length=2, num_prompts=5),
    ]


def test_streams_are_the_same_every_time_and_from_any_position(tmp_path):
    for each in some_tasks(tmp_path):
        # 130 is past the first pass of the file's 100 rows
        whole = list(islice(each.prompts("train", 7), 140))
        assert whole == list(islice(each.prompts("train", 7), 140))
        assert whole[130:] == list(islice(each.prompts("train", 7, start=130), 10))
        assert whole[:20] != list(islice(each.prompts("train", 8), 20))
        assert list(islice(each.prompts("test", 7), 2, 4)) == list(
            islice(each.prompts("test", 7, start=2), 2)
        )
        assert list(islice(pickle.loads(pickle.dumps(each)).prompts("train", 7), 5)) == whole[:5]


def test_splits_never_share_a_problem(tmp_path):
    for each in some_tasks(tmp_path)[:3]:
        train = {
            prompt.text for seed in range(3) for prompt in islice(each.prompts("train", seed), 200)
        }
        test = {
            prompt.text for seed in range(3) for prompt in islice(each.prompts("test", seed), 60)
        }
        assert train
        assert test
        assert not train & test


def test_unknown_split(tmp_path):
    for each in some_tasks(tmp_path):
        with pytest.raises(ValueError, match="unknown split 'valid'"):
            each.prompts("valid", 0)


# arithmetic


@pytest.mark.parametrize("difficulty", ["easy", "medium", "hard"])
def test_arithmetic_answers_are_the_sums_and_demonstrations_earn_the_reward(difficulty):
    arithmetic = Arithmetic(difficulty)
    for prompt in islice(arithmetic.prompts("train", 3), 50):
        problem = prompt.text.removeprefix("What is ").removesuffix("?")
        assert int(prompt.answer) == eval(problem)
        assert len(problem.split()) == 2 * arithmetic.terms - 1
        worked = demonstration(prompt, random.Random(0))
        assert arithmetic.reward(prompt, worked) == 1.0
        assert demonstration(prompt, random.Random(1)) != worked


def test_arithmetic_first_problems_are_pinned():
    first = [
        (p.text, p.answer)
        for p in islice(Arithmetic(terms=4, max_number=9, max_total=99).prompts("test", 0), 2)
    ]
    assert first == [("What is 6 + 2 + 3 - 5?", "6"), ("What is 7 - 1 + 6 + 9?", "21")]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("So the answer is 12.", 1.0),
        ("nonsense, 99. So the answer is 12.\n", 1.0),
        ("So the answer is 13. So the answer is 12.", 1.0),
        ("So the answer is 12. So the answer is 13.", 0.0),
        ("So the answer is 12", 0.0),
        ("So the answer is 12. Yes", 0.0),
        ("So the answer is 012.", 0.0),
        ("So the answer is -12.", 0.0),
        ("12", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_reward_reads_the_closing_sentence_alone(text, reward):
    assert Arithmetic().reward(Prompt("", "", "12"), text) == reward


def test_arithmetic_bad_parameters():
    with pytest.raises(ValueError, match="unknown difficulty 'extreme'. Known: easy, medium, hard"):
        Arithmetic("extreme")
    with pytest.raises(ValueError, match="terms must be a whole number of at least 2, got 1"):
        Arithmetic(terms=1)


# jsonl


def test_jsonl_reads_and_cuts_answers(tmp_path):
    asdiv = Jsonl(
        write(
            tmp_path / "a.jsonl",
            [
                {
                    "body": "Seven red and two green.",
                    "question": "How many? ",
                    "answer": "9 (apples)",
                }
            ],
        ),
        question=["body", "question"],
        answer_regex=r"[^(]+",
        instruction="Q: {question} A:",
        test_frac=0.0,
    )
    (prompt,) = islice(asdiv.prompts("train", 0), 1)
    assert (prompt.text, prompt.answer) == ("Q: Seven red and two green. How many? A:", "9")
    assert asdiv.reward(prompt, "There are 7 + 2 = 9 apples, so the answer is 9.") == 1.0
    assert asdiv.reward(prompt, "There are 7 + 2 = 10 apples.") == 0.0
    year = Jsonl(
        write(tmp_path / "b.jsonl", [{"question": "?", "answer": "in 1999, maybe"}]),
        answer_regex=r"in (\d+)",
        test_frac=0,
    )
    assert next(year.prompts("train", 0)).answer == "1999"


def test_jsonl_train_is_endless_and_test_ends(gsm, tmp_path):
    test = list(gsm.prompts("test", 0))
    num_train = 100 - len(test)
    assert 2 <= len(test) <= 20
    train = list(islice(gsm.prompts("train", 0), 2 * num_train))
    assert sorted(train[:num_train]) == sorted(train[num_train:])
    assert train[:num_train] != train[num_train:]
    assert len({prompt.id for prompt in test + train}) == 100
    both = Jsonl(gsm.path, answer_after="####", test_path=write(tmp_path / "t.jsonl", ROWS[:3]))
    assert sorted(prompt.answer for prompt in both.prompts("test", 0)) == ["0", "2", "4"]
    assert len({prompt.id for prompt in islice(both.prompts("train", 0), 100)}) == 100
    assert list(both.prompts("test", 0, start=3)) == []


@pytest.mark.parametrize(
    ("answer", "text", "equal"),
    [
        ("18", "She makes 9 * 2 = 18 dollars. The answer is 18.", True),
        ("18", "The answer is 17.", False),
        ("1,234", "1234", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"It is $\boxed{(3, \frac{\pi}{2})}$.", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"It is $\boxed{3}$.", False),
        ("p - q", r"\boxed{-q + p}", True),
        (r"\frac{14}{3}", r"so $\boxed{14/3}$", True),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
        ("18", "", False),
    ],
)
def test_equal_answers(answer, text, equal):
    assert equal_answers(answer, text) is equal


def test_a_relative_file_is_said_with_the_folder_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").write_text('{"question": "a", "answer": "1"}\n')
    place = f"questions.jsonl (looked for {tmp_path / 'questions.jsonl'})"
    for name, setting in (("jsonl", "path"), ("jsonl", "test_path"), ("code", "path")):
        with pytest.raises(ValueError) as error:
            task(name, **{"path": "here.jsonl", setting: "questions.jsonl"})
        assert place in str(error.value)
        assert f"Give it as task.{setting}; a relative path starts from" in str(error.value)


def test_jsonl_is_graded_in_a_worker(gsm):
    pairs = [(prompt, f"#### {prompt.answer}") for prompt in islice(gsm.prompts("train", 0), 6)]
    grades = grade(gsm, [*pairs, (pairs[0][0], "no number")], time_limit_s=60)
    assert (grades.reward, grades.num_failed, grades.num_timed_out) == ([1.0] * 6 + [0.0], 0, 0)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (None, {}, r"jsonl: no such file: .*rows.jsonl"),
        ("", {}, r"rows.jsonl is empty, expected one JSON object a line"),
        ("\n\n", {}, r"rows.jsonl is empty"),
        ('{"question": "a", "answer": "1"}\nnot json\n', {}, r"rows.jsonl line 2 is not JSON"),
        ("[1]\n", {}, r"line 1 is a list, expected an object"),
        (
            '{"questin": "a", "answer": "1"}\n',
            {},
            r"line 1 has no field 'question' \(task.question\). Did you mean 'questin'\?",
        ),
        (
            '{"question": "a"}\n',
            {},
            r"line 1 has no field 'answer' \(task.answer\). Known: question",
        ),
        (
            '{"question": "a", "answer": "1"}\n',
            {"answer_after": "####"},
            r"line 1: the answer has no '####' \(answer_after\)",
        ),
        (
            '{"question": "a", "answer": "x"}\n',
            {"answer_regex": r"\d+"},
            r"answer_regex '\\\\d\+' finds nothing in 'x'",
        ),
        (
            '{"question": "a", "answer": "1"}\n',
            {"instruction": "Solve it"},
            r"instruction must contain \{question\}",
        ),
        (
            '{"question": "a", "answer": "1"}\n',
            {"test_frac": 1.0},
            r"test_frac must be a number >= 0 and < 1",
        ),
    ],
)
def test_jsonl_bad_input_is_one_clear_line(tmp_path, content, settings, message):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        task("jsonl", path=str(path), **settings)
    assert "\n" not in str(error.value)


def test_jsonl_split_without_rows(tmp_path):
    only = Jsonl(write(tmp_path / "one.jsonl", ROWS[:1]), test_frac=0.0)
    with pytest.raises(
        ValueError, match="the test split of .* has no rows. Change test_frac or give test_path"
    ):
        only.prompts("test", 0)


# gym


def test_gym_uses_its_own_scorer_and_the_threshold():
    sums = task("gym:basic_arithmetic", max_terms=3)
    prompt = next(sums.prompts("train", 0))
    assert prompt.text.endswith("\nGive the final answer between <answer> and </answer>.")
    assert (
        sums.reward(prompt, f"hm <answer>1</answer>, no: <answer> {prompt.answer} </answer>") == 1.0
    )
    assert sums.reward(prompt, prompt.answer) == 1.0
    # the scorer gives len(answer) / len(text) to text that contains the answer
    padded = f"{prompt.answer} {'x' * 99}"
    raw = task("gym:basic_arithmetic", max_terms=3, threshold=None)
    assert raw.reward(prompt, padded) == pytest.approx(len(prompt.answer) / len(padded))
    assert sums.reward(prompt, padded) == 0.0


def test_gym_scorer_that_raises_is_reward_0():
    factors = task("gym:prime_factorization")
    prompt = next(factors.prompts("test", 0))
    grades = grade(
        factors, [(prompt, "no idea"), (prompt, prompt.answer)], time_limit_s=60, num_workers=1
    )
    assert (grades.reward, grades.num_failed) == ([0.0, 1.0], 1)
    assert "the grader raised ValueError" in grades.messages[0]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "gym:basic_aritmetic",
            {},
            "unknown reasoning-gym dataset 'basic_aritmetic'. Did you mean 'basic_arithmetic'?",
        ),
        (
            "gym:basic_arithmetic",
            {"max_term": 3},
            "gym:basic_arithmetic has no parameter 'max_term'. Did you mean 'max_terms'?",
        ),
        ("gym:basic_arithmetic", {"seed": 3}, "'seed' is not yours to set"),
        ("gym:game_of_life_halting", {}, "its rewards carry no signal"),
        ("gym", {}, "needs the name of a reasoning-gym dataset"),
    ],
)
def test_gym_bad_input(name, params, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        task(name, **params)


# tabular


def exact_gradient_by_loops(policy: TabularPolicy, reward_PM: torch.Tensor) -> list[list[float]]:
    """1/P sum_p sum_y pi(y) R(y) sum_t (1[a = y_t] - pi(a | c_t)), with prefixes as strings and
    probabilities as numbers.
    """
    letters, length = policy.num_letters, policy.length
    prefixes = [()]
    for depth in range(1, length):
        prefixes += [tuple(string) for string in all_strings(letters, depth).tolist()]
    out = [[0.0] * letters for _ in range(policy.num_prompts * len(prefixes))]
    table = policy.logits.softmax(-1).tolist()
    for p in range(policy.num_prompts):
        row = {prefix: p * len(prefixes) + number for number, prefix in enumerate(prefixes)}
        for m, string in enumerate(all_strings(letters, length).tolist()):
            probability = 1.0
            for t, letter in enumerate(string):
                probability *= table[row[tuple(string[:t])]][letter]
            for t, letter in enumerate(string):
                c = row[tuple(string[:t])]
                for a in range(letters):
                    out[c][a] += (
                        probability
                        * float(reward_PM[p, m])
                        * ((a == letter) - table[c][a])
                        / policy.num_prompts
                    )
    return out


def test_tabular_gradient_is_exact():
    tabular = Tabular("abc", length=3, num_prompts=2, partial=0.5)
    policy = TabularPolicy(3, 3, num_prompts=2)
    torch.nn.init.normal_(policy.logits, generator=torch.Generator().manual_seed(0))
    reward_PM = reward_table(tabular)
    expected_reward(policy, reward_PM).backward()
    by_loops = torch.tensor(exact_gradient_by_loops(policy, reward_PM), dtype=torch.float64)
    assert torch.allclose(policy.logits.grad, by_loops, atol=1e-14)
    assert by_loops.abs().max() > 0.01


def test_tabular_by_hand():
    # two letters, one long, pi(b) = 3/4, reward 1 for b: J = 3/4, dJ/dlogit_b = pi(b) (1 - pi(b)) =
    # 3/16
    policy = TabularPolicy(2, 1)
    with torch.no_grad():
        policy.logits[0, 1] = torch.tensor(3.0).log()
    value = expected_reward(policy, torch.tensor([[0.0, 1.0]]))
    value.backward()
    assert value.item() == pytest.approx(3 / 4, abs=1e-7)
    assert policy.logits.grad.tolist()[0] == pytest.approx([-3 / 16, 3 / 16], abs=1e-7)


def test_tabular_contexts_are_trie_nodes_and_forward_agrees():
    policy = TabularPolicy(2, 3, num_prompts=2)
    strings_ML = all_strings(2, 3)
    # "", a, b, aa, ab, ba, bb = 0 .. 6
    assert policy.context_NT(torch.zeros(8, dtype=torch.long), strings_ML)[:, 2].tolist() == [
        3,
        3,
        4,
        4,
        5,
        5,
        6,
        6,
    ]
    torch.nn.init.normal_(policy.logits, generator=torch.Generator().manual_seed(1))
    prompt_N = torch.ones(8, dtype=torch.long)
    logp_NT = policy.logp_NT(prompt_N, strings_ML)
    assert logp_NT.sum(1).exp().sum().item() == pytest.approx(1.0)
    logits = policy(torch.cat([prompt_N[:, None] + 2, strings_ML], 1)).logits
    assert torch.equal(logits.log_softmax(-1).gather(2, strings_ML[:, :, None])[:, :, 0], logp_NT)
    assert torch.equal(policy(torch.tensor([[3, 1]])).logits, policy.logits[torch.tensor([[7, 9]])])


def test_tabular_samples_follow_the_table():
    policy = TabularPolicy(2, 2)
    torch.nn.init.normal_(policy.logits, generator=torch.Generator().manual_seed(2))
    num = 20_000
    prompt_N = torch.zeros(num, dtype=torch.long)
    drawn_NT = policy.sample(prompt_N, torch.Generator().manual_seed(0))
    share_M = torch.bincount(drawn_NT[:, 0] * 2 + drawn_NT[:, 1], minlength=4) / num
    exact_M = policy.logp_NT(torch.zeros(4, dtype=torch.long), all_strings(2, 2)).sum(1).exp()
    # five standard errors of a share
    assert ((share_M - exact_M).abs() < 5 * (exact_M * (1 - exact_M) / num).sqrt()).all()


def test_tabular_rewards():
    tabular = Tabular("ab", length=4, partial=0.4)
    prompt = tabular.prompt(0)
    wrong = "".join("b" if letter == "a" else "a" for letter in prompt.answer)
    rewards = [tabular.reward(prompt, wrong[:k] + prompt.answer[k:]) for k in range(5)]
    assert rewards == pytest.approx([1.0, 0.3, 0.2, 0.1, 0.0])
    assert reward_table(tabular).sum(1).tolist() == pytest.approx([1 + 0.4 * (16 * 0.5 - 1)])


# the builder


def test_a_task_and_a_reward_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own_tasks.py").write_text(
        "from helpers.tabular import Tabular\n"
        "class Task(Tabular): pass\n"
        "class NoReward: prompts = None\n"
        "def length(prompt, text): return len(text) / 10\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = task("own_tasks:Task", alphabet="xy", length=2)
    assert next(own.prompts("train", 0)).answer in ("xx", "xy", "yx", "yy")
    graded = task({"name": "own_tasks:Task", "reward": "own_tasks:length"})
    assert graded.reward(Prompt("", ""), "12345") == 0.5
    assert next(graded.prompts("train", 0)) == next(
        task("helpers.tabular:Tabular").prompts("train", 0)
    )
    assert (
        task("helpers.tabular:Tabular", reward=lambda prompt, text: 2.0).reward(Prompt("", ""), "")
        == 2.0
    )
    for name, message in [
        ("own_tasks:Tusk", "module 'own_tasks' has no 'Tusk'. Did you mean 'Task'?"),
        ("own_taskz:Task", "cannot import 'own_taskz'"),
        ("own_tasks:NoReward", "is not a task: expected a class with prompts"),
        ("own_tasks:", "expected an import path like your.module:name"),
    ]:
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            task(name)
    with pytest.raises(
        ValueError,
        match=(
            "reward 'own_tasks:lenght': module 'own_tasks' has no 'lenght'. Did you mean 'length'"
        ),
    ):
        task("arithmetic", reward="own_tasks:lenght")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("arithmetics", "unknown task 'arithmetics'. Did you mean 'arithmetic'?"),
        (
            {"name": "arithmetic", "term": 3},
            "task 'arithmetic' has no parameter 'term'. Did you mean 'terms'?",
        ),
        ("jsonl", "task 'jsonl' needs the parameter 'path'"),
        ({"path": "x"}, "expected a mapping with 'name'"),
    ],
)
def test_unknown_names_and_parameters(spec, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        task(spec)

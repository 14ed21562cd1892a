"""Programs that mean harm, or mean to look right, in the sandbox: no test passes, nothing is left,
and the next program is judged as if nothing had been."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from counterpoise.errors import ConfigError
from counterpoise.tasks import sandbox as sandboxes
from counterpoise.tasks.sandbox import KINDS, Limits, Program, Sandbox, why_not
from counterpoise.tasks.sandbox.inside.nest import CALLS, MACHINES, filter_code
from helpers.sandboxes import NEEDS_BUBBLEWRAP, descendants

REPOSITORY = Path(__file__).parents[2]
LIMITS = Limits(time_limit_s=3.0, memory_mb=256, disk_mb=4, result_kb=64)
RIGHT = Program("def f(x):\n    return 2 * x", ("assert f(2) == 4", "assert f([1]) == [1, 1]"))
SECRET = 79190211  # what the tests expect; no program is told

pytestmark = NEEDS_BUBBLEWRAP


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(LIMITS) as one:
        yield one


HARM = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork, errors swallowed": """
import os
def f(x):
    while True:
        try:
            os.fork()
        except OSError:
            pass
""",
    "threads": "import threading\nwhile True:\n    threading.Thread(target=print).start()",
    "memory": "x = [0]\nwhile True:\n    x += x",
    "memory at once": "x = bytearray(1 << 40)",
    "disk": "h = open('/tmp/a', 'wb')\nwhile True:\n    h.write(bytes(1 << 20))",
    "many files": "k = 0\nwhile True:\n    open(f'/tmp/{k}', 'w').close()\n    k += 1",
    "print": "while True:\n    print('x' * 100000, flush=True)",
    "loop": "while True:\n    pass",
    "loop that swallows": """
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
""",
    "sleep": "import time\ntime.sleep(1000)",
    "loop in C": "x = 'a' * 30\nimport re\nre.match('(a*)*b', x)",
    "kill all": "import os\nos.kill(-1, 9)\nos._exit(0)",
    "kill the parent": "import os\nos.kill(os.getppid(), 9)\nos._exit(0)",
    "kill the first": "import os\nos.kill(1, 9)\nos._exit(0)",
    "kill the group": "import os\nos.killpg(0, 9)\nos._exit(0)",
    "kill by number": """
import os
for pid in range(1, 70000):
    try:
        os.kill(pid, 9)
    except OSError:
        pass
""",
    "sockets": "import socket\nsocket.socket()",
    "a command": "import subprocess\nsubprocess.run(['/usr/bin/true'], check=True)",
    "another python": "import os, sys\nos.execv(sys.executable, ['python', '-c', 'pass'])",
    "close all": "import os\nos.closerange(0, 4096)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "deep": "def f(x):\n    return f(x)",
    "deep source": "x = " + "(" * 5000 + ")" * 5000,
    "huge result": f"def f(x):\n    return 'a' * {1 << 22}",
    "endless result": "import itertools\ndef f(x):\n    return itertools.count()",
    "deep result": "a = []\nfor _ in range(10**5):\n    a = [a]\ndef f(x):\n    return a",
    "round result": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "no text": "import os\nos.write(1, b'\\xff\\xfe')\ndef f(x):\n    return b'\\xff'",
    "surrogates": "def f(x):\n    return '\\ud800'",
    "memory by files": "import os\nos.memfd_create('a')",
    "namespaces": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) or libc.mount(b"a", b"/tmp", b"tmpfs", 0, None):
    raise PermissionError(ctypes.get_errno())
""",
}

FORGED = {
    "os._exit": "import os\nos._exit(0)",
    "os._exit later": "import os\ndef f(x):\n    os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit later": "import sys\ndef f(x):\n    sys.exit(0)",
    "equals all": """
class All:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0.0
    def __rsub__(self, other): return 0.0
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __contains__(self, other): return True
    def __iter__(self): return iter([self])
def f(x):
    return All()
""",
    "a number that equals all": """
class All(int):
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    def __lt__(self, other): return True
def f(x):
    return All()
""",
    "no assertions": """
import builtins, unittest
class Quiet(BaseException): pass
builtins.AssertionError = Quiet
builtins.abs = lambda x: 0
builtins.set = lambda x: x
builtins.compile = builtins.exec = builtins.eval = lambda *a, **k: None
unittest.TestCase.assertEqual = lambda *a: None
def f(x):
    return 0
""",
    "other builtins": """
def abs(x): return 0.0
def set(x): return x
def f(x): return 0.0
""",
    "looks for the number": f"""
import gc, re, sys
def numbers(thing):
    if isinstance(thing, int):
        yield thing
    elif isinstance(thing, (str, bytes)):
        yield from map(int, re.findall("[0-9]{{8}}", str(thing)))
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            if isinstance(part, (int, str, bytes)):
                yield from numbers(part)
def f(x):
    things, frame = gc.get_objects(), sys._getframe()
    while frame:
        things += [frame.f_code.co_consts, *frame.f_locals.values(), *frame.f_globals.values()]
        frame = frame.f_back
    hits = [n for t in things for n in numbers(t) if n % 100003 == {SECRET % 100003} and n > 10**7]
    return hits[0] if hits else 0
""",
    "prints results": """
print('[null, null]')
print('{"value": true}')
import os
for fd in range(64):
    try:
        os.write(fd, b'[null, null]\\n')
    except OSError:
        pass
""",
    "writes into the socket": """
import os
for _ in range(100):
    os.write(3, b'{"value": true}\\n')
""",
    "asks the judge to run code": """
import os
os.write(3, b'{"do": "call", "on": "exit", "args": [0], "kwargs": {}}\\n')
""",
    "asks for objects of the judge": """
import os
for do in ("call", "get", "run", "name"):
    os.write(3, b'{"do": "%s", "on": 0, "args": ["__globals__"], "kwargs": {}}\\n' % do.encode())
""",
    "raises the judge's words": """
class AssertionError(Exception): pass
class Failure(BaseException): pass
def f(x):
    raise Failure("")
""",
    "ends the iteration": "def f(x):\n    raise StopIteration",
}
TESTS = (
    f"assert f(1) == {SECRET}",
    f"assert abs(f(1) - {SECRET}) < 1e-6",
    f"assert {SECRET} in f(1)",
    f"assert f(1) > {SECRET}",
    f"assert set(f(1)) == {{{SECRET}}}",
    f"for k in range(2):\n    assert f(k) == {SECRET}",
    f"assert [f(k) for k in range(2)] == [{SECRET}] * 2",
)


def check_no_effect(sandbox: Sandbox, source: str) -> list[str]:
    """No test passes in bounded time, nothing is left, the next program is judged right."""
    began = time.monotonic()
    errors = sandbox.run(Program(source, TESTS))
    took_s = time.monotonic() - began
    assert all(errors), errors
    assert took_s < LIMITS.time_limit_s + sandboxes.SPARE_S + sandboxes.START_S
    assert sandbox.run(RIGHT) == [None, None]
    assert sandbox.process is not None
    assert len(descendants(sandbox.process.pid)) <= 4  # bwrap, the judge, the nursery, a program
    return [error for error in errors if error]


@pytest.mark.parametrize("name", HARM)
def test_harm_has_no_effect(sandbox, name):
    check_no_effect(sandbox, HARM[name])


@pytest.mark.parametrize("name", FORGED)
def test_no_program_looks_right_that_is_not(sandbox, name):
    check_no_effect(sandbox, FORGED[name])


def look(sandbox: Sandbox, source: str) -> list[str | None]:
    return sandbox.run(Program(source, ("assert f() == []",)))


def test_a_program_sees_neither_home_nor_repository_nor_environment(sandbox):
    paths = [
        str(REPOSITORY),
        str(Path(__file__)),
        f"{Path.home()}/.bashrc",
        "/etc/passwd",
        "/proc/1",
    ]
    assert Path(__file__).exists()
    source = f"import os\ndef f():\n    return [p for p in {paths} if os.path.exists(p)]"
    assert look(sandbox, source) == [None]
    known = ["PATH", "LANG", "PYTHONHASHSEED", "PWD", "LC_CTYPE"]
    source = f"import os\ndef f():\n    return sorted(set(os.environ) - set({known}))"
    assert look(sandbox, source) == [None]


def test_a_program_writes_to_its_own_tmp_alone(sandbox):
    folders = ["/", "/usr", "/usr/lib", "/dev", "/dev/shm", "/inside", os.path.dirname(os.__file__)]
    source = f"""
import os
def f():
    out = []
    for folder in {folders}:
        try:
            open(folder + "/counterpoise_was_here", "w").close()
            out.append(folder)
        except OSError:
            pass
    return out
"""
    assert look(sandbox, source) == [None]
    source = """
import os
def f():
    before = os.listdir("/tmp") + os.listdir(".")
    open("left", "w").write("x")
    return before
"""
    assert look(sandbox, source) == [None]
    assert look(sandbox, source) == [None]  # what the last program wrote is gone
    assert not Path("/tmp/left").exists()


def test_a_program_has_no_privileges_and_no_company(sandbox):
    source = """
import ctypes, os, struct
def f():
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    ctypes.CDLL(None).capget(header, data)
    others = []
    for pid in range(2, 5000):
        try:
            os.kill(pid, 0)
            others.append(pid)
        except ProcessLookupError:
            pass
    return others + [b for b in data.raw if b] + ([] if os.getpid() == 1 else ["pid"])
"""
    assert look(sandbox, source) == [None]


def test_an_answer_never_meets_the_tests_of_others(sandbox):
    """A program's memory is a copy of one that held no test, also of the programs before it."""
    sandbox.run(Program("def f(x): return 1", ('assert f("a long and rare marker, zyx") == 1',)))
    source = """
import gc
def f():
    word = "rare " + "marker"
    return [t for t in gc.get_objects() if isinstance(t, (dict, list)) and word in str(t)[:10**5]]
"""
    assert look(sandbox, source) == [None]


def test_right_partial_and_wrong_programs(sandbox):
    source = "def f(x):\n    return x * x if x > 0 else x\nclass C:\n    n = 3"
    tests = ("assert f(3) == 9", "assert f(-2) == 4", "assert C().n == 3", "assert f('a') == 1")
    errors = sandbox.run(Program(source, tests))
    assert errors[0] is errors[2] is None
    assert errors[1] == "assert f(-2) == 4: got -2, expected 4"
    assert errors[3] is not None
    assert "TypeError" in errors[3]
    wrong = sandbox.run(Program("def f(x:\n", RIGHT.tests))
    assert all(error and error.startswith("SyntaxError") for error in wrong)
    empty = sandbox.run(Program("", RIGHT.tests))
    assert all(error and "NameError: name 'f' is not defined" in error for error in empty)
    assert sandbox.run(Program("", ("assert 1 +",)))[0] is not None
    assert "ZeroDivisionError" in (sandbox.run(Program("", ("1 / 0",)))[0] or "")


VALUES = [
    *("None", "True", "0", "-3", "2**200", "1.5", "float('inf')", "'ü\\n'", "b'a\\xff'", "1j"),
    *("[1, [2]]", "(1, (2,))", "{1, 2}", "frozenset({1})", "{'a': [1], 2: (3,)}", "range(3)"),
    *("[]", "()", "set()", "{}", "[None, True]", "{(1, 2): {3}}"),
]


@pytest.mark.parametrize("value", VALUES)
def test_plain_data_comes_back_as_it_is(sandbox, value):
    tests = (f"assert f() == {value}", f"assert repr(f()) == repr({value})", f"assert g({value})")
    source = f"def f():\n    return {value}\ndef g(x):\n    return repr(x) == repr({value})"
    assert sandbox.run(Program(source, tests)) == [None] * 3


def test_tests_of_other_forms_hold_as_in_one_process(sandbox):
    source = """
import collections, datetime, fractions
class Node:
    def __init__(self, data): self.data, self.left = data, None
    def __eq__(self, other): return self.data == other.data
def depth(node): return 0 if node is None else 1 + depth(node.left)
def sort(x): x.sort()
def apply(g, xs): return [g(x) for x in xs]
def kinds(xs, kind): return [x for x in xs if isinstance(x, kind)]
def gen(n): yield from range(n)
def fail(): raise ValueError("no")
def count(s): return collections.Counter(s)
def day(): return datetime.date(2020, 1, 2)
def third(): return fractions.Fraction(1, 3)
def sum(a, b): return a * b
"""
    tests = (
        "assert depth(root) == 2",
        "assert root.left.data == 2 and root.data == 1",
        "assert Node(1) == Node(1) and not Node(1) == Node(2)",
        "x = [3, 1]\nsort(x)\nassert x == [1, 3]",
        "assert apply(lambda v: v + 1, [1, 2]) == [2, 3]",
        "assert kinds([1, 'a'], str) == ['a']",
        "assert list(gen(3)) == [0, 1, 2]",
        "try:\n    fail()\nexcept ValueError as e:\n    x = e\nassert str(x) == 'no'",
        "assert count('aab') == {'a': 2, 'b': 1}",
        "assert math.isclose(third(), 1 / 3)",
        "assert str(day()) == '2020-01-02'",
        "assert sum(3, 4) == 12",
    )
    setup = "import math\nroot = Node(1)\nroot.left = Node(2)"
    namespace: dict[str, object] = {}
    for code in (source, setup, *tests):
        exec(code, namespace)  # they hold in one process
    assert sandbox.run(Program(source, tests, setup, ("sum",))) == [None] * len(tests)


def test_results_do_not_depend_on_the_sandbox_or_on_what_ran_before():
    source = "import random\ndef f():\n    return [random.random(), list({'a', 'b', 'c'})]"
    program = Program(source, ("assert f() == 0",))
    with Sandbox(LIMITS) as one, Sandbox(LIMITS) as two:
        one.run(RIGHT)
        assert one.run(program) == two.run(program) == one.run(program)


def test_the_end_of_a_sandbox_leaves_no_process():
    with Sandbox(LIMITS) as one:
        one.run(RIGHT)
        assert one.process is not None
        pids = descendants(one.process.pid)
        assert pids
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_test_that_ends_the_judge_costs_one_program(sandbox):
    errors = sandbox.run(Program("", ("import os; os._exit(0)", "assert True")))
    assert all(error and "judge" in error for error in errors)
    assert sandbox.run(RIGHT) == [None, None]


def test_without_bubblewrap_there_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert why_not().endswith("none to run without.")
    assert "bubblewrap is not installed. Install it" in why_not()
    assert "\n" not in why_not()


def test_where_namespaces_are_forbidden_there_is_one_line(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sandboxes, "bubblewrap", lambda python: [str(fake)])
    assert "No permissions to create new namespace. Allow user namespaces" in why_not()
    with pytest.raises(ConfigError, match="does not run"):
        Sandbox().run(RIGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_both_kinds_judge_alike(kind):
    assert why_not(kind) == ""
    with Sandbox(LIMITS, kind) as one:
        assert one.run(RIGHT) == [None, None]
        assert all(one.run(Program("while True:\n    pass", RIGHT.tests)))
        assert one.run(RIGHT) == [None, None]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_each_call_and_no_other(machine):
    """The filter as a kernel reads it: rows of (operation, jump, jump, value)."""
    import struct

    column, architecture = MACHINES[machine]
    rows = list(struct.iter_unpack("HBBI", filter_code(machine)))

    def verdict(number: int, architecture: int) -> int:
        at, loaded = 0, 0
        while True:
            operation, yes, no, value = rows[at]
            if operation == 0x06:
                return value
            if operation == 0x20:
                loaded = {0: number, 4: architecture}[value]
                at += 1
                continue
            is_true = loaded == value if operation == 0x15 else loaded >= value
            at += 1 + (yes if is_true else no)

    refused = {n for n in range(1000) if verdict(n, architecture) == 0x00050001}
    assert refused == {pair[column] for pair in CALLS.values()} - {None}
    assert verdict(0, architecture) == 0x7FFF0000
    assert verdict(0x40000000, architecture) == 0x00050001
    assert verdict(0, 0) == 0x80000000

"""The file has three rooms: none names anything of a later one, the first works alone, none grows.

The limits are what the rooms have now, rounded up: a change that must raise one says why.
"""

import ast
import dis
import functools
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import agent as agent_module
from agent import agent_env, run_once
from backend import Backend
from frontend import Frontend
from pg import Database

SOURCE = Path(__file__).resolve().parent.parent / "serversync.py"
BANNER = "# ROOM "
LINES = {1: 4006, 2: 1090, 3: 3951}
LARGEST = {"class lines": 450, "attributes": 15, "function lines": 75}

# The file cut behind room 1, with the little that a command line does for it.
ALONE = """

def main():
    start_logging(os.environ)
    config = load_config(read_env_file(sys.argv[2], os.environ))
    process = Process(os.environ)
    process.install()
    return Agent(config, process, lambda **_: None, once=True).run_once()
"""


@functools.cache
def rooms() -> dict[int, tuple[int, int]]:
    """The first and the last line of each room."""
    lines = SOURCE.read_text().splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line.startswith(BANNER)]
    ends = [start - 2 for start in starts[1:]] + [len(lines)]
    return {
        room: (start - 1, end)
        for room, (start, end) in enumerate(zip(starts, ends, strict=True), 1)
    }


def room_of(line: int) -> int:
    return sum(line >= first for first, _ in rooms().values())


def globals_of(code: types.CodeType) -> Iterator[str]:
    """The global names that it uses, itself or in what is made in it."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from globals_of(inner)


def annotations_of(statement: ast.AST) -> Iterator[str]:
    """The names in its annotations: those of local variables are in no code, others are texts."""
    for node in ast.walk(statement):
        for note in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            for part in ast.walk(note) if note else ():
                if isinstance(part, ast.Name):
                    yield part.id
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from re.findall(r"\w+", part.value)


def names_of(statement: ast.stmt) -> set[str]:
    code = compile(ast.Module([statement], []), "serversync.py", "exec", dont_inherit=True)
    return {*globals_of(code), *annotations_of(statement)}


def made_by(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
    return [name.id for each in targets for name in ast.walk(each) if isinstance(name, ast.Name)]


def test_a_room_names_nothing_of_a_later_one() -> None:
    body = ast.parse(SOURCE.read_text()).body
    home = {name: room_of(each.lineno) for each in body for name in made_by(each)}
    assert set(home.values()) >= {1, 2, 3}
    for each in body:
        room = room_of(each.lineno)
        for name in names_of(each):
            assert home.get(name, 0) <= max(room, 1), f"line {each.lineno} names {name}"


@pytest.mark.parametrize(
    "source",
    [
        "def f(error: Exception | Doctor) -> None: ...",
        "def f() -> list[Doctor]: ...",
        "def f():\n    error: Exception | Doctor = g()",
        "class Job:\n    error: 'Exception | Doctor'",
        "class Job:\n    def f(self, *errors: Doctor): ...",
        "def f():\n    return Doctor.name",
    ],
)
def test_a_name_is_seen_wherever_it_stands(source: str) -> None:
    [statement] = ast.parse(source).body
    assert "Doctor" in names_of(statement)


def test_the_first_room_alone_delivers_a_call_with_its_recording(
    db: Database,
    frontend: Frontend,
    backend: Backend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, end = rooms()[1]
    program = tmp_path / "first_room.py"
    program.write_text("\n".join(SOURCE.read_text().splitlines()[:end]) + ALONE)
    monkeypatch.setattr(agent_module, "PROGRAM", str(program))
    call = backend.end_call()
    done = run_once(agent_env(db, frontend, backend))
    assert done.returncode == 0, done.stderr
    assert db.pending() == []
    assert frontend.files[call.call_log_id].sha256 == call.sha256
    assert not call.wav.exists()


def test_no_room_grows() -> None:
    for room, (first, last) in rooms().items():
        assert last - first + 1 <= LINES[room], f"room {room} has {last - first + 1} lines"


def attributes_of(each: ast.ClassDef) -> set[str]:
    """What its methods set, and the fields of a dataclass."""
    made = {
        node.attr
        for node in ast.walk(each)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    if not any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list):
        return made
    return made | {name for line in each.body if isinstance(line, ast.AnnAssign)
                   for name in made_by(line)}  # fmt: skip


def test_no_class_or_function_grows() -> None:
    for each in ast.walk(ast.parse(SOURCE.read_text())):
        if not isinstance(each, ast.FunctionDef | ast.ClassDef):
            continue
        size = (each.end_lineno or 0) - each.lineno + 1
        kind = "class lines" if isinstance(each, ast.ClassDef) else "function lines"
        assert size <= LARGEST[kind], f"{each.name} has {size} lines"
        if isinstance(each, ast.ClassDef) and each.name != "Config":  # that is the option table
            made = attributes_of(each)
            assert len(made) <= LARGEST["attributes"], f"{each.name} has {len(made)} attributes"

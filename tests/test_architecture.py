"""The floors of the house, and what no room may do; docs/design.md draws them."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from vfl.core.products import products

PACKAGE = Path(__file__).parents[1] / "vfl"
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    0: "core",
    1: "config compression datasets models privacy transport",
    2: "defenses session",
    3: "attacks clients mpc server",
    4: "federation training",
    5: "estimators experiments serving",
    6: "cli horizontal llm tensors testing trees __init__ __main__",
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms.split()}

#: Imports on one floor, with the reason.
BESIDE = {
    ("attacks", "mpc"): "some attacks look at sums under masks, and at permuted orders",
    ("datasets", "models"): "texts become numbers by the tokenizer of a pretrained model",
    ("horizontal", "cli"): "commands of a product print as all others do; it enters by its table",
    ("llm", "cli"): "likewise",
    ("tensors", "cli"): "likewise",
    ("trees", "cli"): "likewise",
    ("session", "defenses"): "a round runs the hooks of a defense",
    ("training", "federation"): "a federated run happens on a deployment",
    ("__main__", "cli"): "python -m vfl is the command line",
}

#: Files that load our own modules by name, for tables of members and of public names.
LOAD_OURS = {"core/__init__.py", "core/products.py", "core/registry.py"}
#: Files that load other packages by name, with the reason.
LOAD_OTHERS = {
    "datasets/files.py": "an extra",
    "datasets/sql.py": "a database's driver, by the address of the table",
    "experiments/on_ray.py": "an extra",
    "federation/upstream.py": "Flower's internal names, which move",
    "federation/workers.py": "modules of Flower and Arrow, before a worker forks",
    "training/writers.py": "extras",
}

#: Files that start processes, with the reason.
STARTERS = {
    "core/processes.py": "the one starter",
    "testing/writer.py": "runs a writer of runs to its end, for its author",
}

SERIALISERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
#: Rooms and files that know sockets, with the reason.
SOCKET_PLACES = {
    "core/processes.py": "waits by poll until another process has ended, and opens no socket",
    "federation/": "serves Flower's application behind two guards, and talks to nobody itself",
    "serving/": "its HTTP server listens for clients, by asyncio and TLS",
    "transport/": "everything that is sent or received",
}
SOCKETS = {"socket", "ssl", "socketserver", "asyncio", "select", "selectors", "grpc"}


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def walked(tree):
    """All nodes of a tree, for the many tests that look through each file."""
    return list(ast.walk(tree))


def imported_modules(tree):
    """Full names of all imported modules, those inside functions and type checks included."""
    for node in walked(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole module"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tables(tree):
    """Tables by which the registry and its like load our modules: the one way by name."""
    names = set()
    for node in walked(tree):
        if is_call(node, "Registry", "lazy_names", "Product"):
            yield node
            names |= {found.id for found in walked(node) if isinstance(found, ast.Name)}
    for node in walked(tree):
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) in names:
            yield node


OURS = {
    ".".join(("vfl", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in FILES
} - {"vfl"}


def named_modules(tree):
    """Our modules whose names stand in a text, other than in such a table."""
    listed = {id(node) for table in tables(tree) for node in walked(table)}
    for node in walked(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if id(node) not in listed and module in OURS:
                yield module


@cache
def room_imports():
    """(room, room it imports, file) for every import between two rooms, those by name included."""
    found = set()
    for path in FILES:
        tree = tree_of(path)
        for module in [*imported_modules(tree), *named_modules(tree)]:
            parts = module.split(".")
            if parts[0] == "vfl" and len(parts) > 1 and parts[1] not in (room_of(path), "__init__"):
                found.add((room_of(path), parts[1], path.name))
    return sorted(found)


def dotted(node):
    """`a.b.c` of names and attributes alone; unparsing every call takes half a minute."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def is_call(node, *names):
    return isinstance(node, ast.Call) and dotted(node.func) in names


def loads_by_name(tree):
    calls = ("import_module", "importlib.import_module", "__import__")
    return any(is_call(node, *calls) for node in walked(tree))


def test_the_registry_alone_loads_our_modules_by_name():
    loading = {str(path.relative_to(PACKAGE)): tree_of(path) for path in FILES}
    loading = {file: tree for file, tree in loading.items() if loads_by_name(tree)}
    assert set(loading) == LOAD_OURS | set(LOAD_OTHERS)
    naming = [file for file in LOAD_OTHERS if any(names_of_ours(loading[file]))]
    assert naming == []


def names_of_ours(tree):
    """Our modules named in a text, and names that are made with our own as they begin."""
    yield from named_modules(tree)
    for node in walked(tree):
        if isinstance(node, ast.JoinedStr):
            yield from (part for part in ast.unparse(node).split("'") if part.startswith("vfl."))


def test_every_room_has_a_floor():
    assert {room_of(path) for path in FILES} <= set(FLOOR)
    assert {imported for _, imported, _ in room_imports()} <= set(FLOOR)


def test_rooms_import_lower_floors_only():
    upwards = [
        f"{room}/{file} imports {imported}"
        for room, imported, file in room_imports()
        if FLOOR[imported] >= FLOOR[room] and (room, imported) not in BESIDE
    ]
    assert upwards == []


def test_rooms_form_no_circle():
    graph = {}
    for room, imported, _ in room_imports():
        graph.setdefault(room, set()).add(imported)
    assert list(TopologicalSorter(graph).static_order())


def test_files_of_tensors_form_no_circle():
    """Imports inside functions count: what a worker does on shares and with noise is below it."""
    files = {f"vfl.tensors.{path.stem}": path for path in FILES if path.parent.name == "tensors"}
    graph = {
        name: set(imported_modules(tree_of(path))) & files.keys() for name, path in files.items()
    }
    assert graph["vfl.tensors.workers"] >= {"vfl.tensors.private", "vfl.tensors.shares"}
    assert list(TopologicalSorter(graph).static_order())


def test_every_exception_is_needed():
    pairs = {(room, imported) for room, imported, _ in room_imports()}
    assert sorted(set(BESIDE) - pairs) == []


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("attacks", {"clients", "server"}),
        ("clients", {"server", "mpc"}),
        ("server", {"clients", "mpc"}),
        ("mpc", {"clients", "server"}),
    ],
)
def test_rooms_that_never_meet(room, forbidden):
    """By whatever way: not through rooms in between either."""
    below = {room}
    while True:
        more = below | {imported for one, imported, _ in room_imports() if one in below}
        if more == below:
            break
        below = more
    assert not below & forbidden


def test_no_other_room_imports_a_product():
    into = [
        f"{room}/{file} imports {imported}"
        for room, imported, file in room_imports()
        if imported in products()
    ]
    assert into == []


def test_only_commands_of_products_import_the_command_line():
    above = {(room, file) for room, imported, file in room_imports() if imported == "cli"}
    assert {room for room, _ in above} <= {"__main__", *products()}
    assert {file for _, file in above} <= {"__main__.py", "command.py"}


def loaded_by(*modules):
    script = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "modules",
    [("vfl",), ("vfl.cli",), ("vfl.core.errors", "vfl.core.registry", "vfl.config")],
    ids=lambda modules: "+".join(modules),
)
def test_what_loads_no_torch(modules):
    loaded = loaded_by(*modules)
    assert set(modules) <= loaded
    assert not loaded & {"torch", "flwr", "pandas", "sklearn"}


PLAIN_TRAINING = """
import sys
from vfl.cli import app
app(["train", *sys.argv[1:]], standalone_mode=False)
print(*sorted(sys.modules), file=sys.stderr)
"""
PLAIN_EXPERIMENT = """
parties.left.columns = ["a*"]
parties.right.columns = ["b*"]
label.column = "late"
train.epochs = 1
"""
#: None of it is needed to train on a table, to judge the model and to write its report.
NEEDLESS = {"flwr", "scipy", "sklearn", "sympy", "torch._dynamo", "torchvision", "vfl.mpc"}


def test_a_training_on_a_table_loads_nothing_that_it_does_not_need(tmp_path):
    lines = [f"{n},{n % 7},{n % 5},{n % 3},{int(n % 7 > 3)}" for n in range(200)]
    (tmp_path / "table.csv").write_text("\n".join(["id,a1,a2,b1,late", *lines]))
    (tmp_path / "plain.toml").write_text(
        'data = { source = "table.csv", id = "id" }' + PLAIN_EXPERIMENT
    )
    arguments = [tmp_path / "plain.toml", "--runs", tmp_path / "runs"]
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_TRAINING, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "test auc" in done.stdout
    loaded = set(done.stderr.split())
    assert {"torch", "pandas", "vfl.experiments.pages"} <= loaded
    assert not loaded & NEEDLESS


def unsafe_things(tree):
    """Descriptions of whatever could run code that comes from data."""
    for module in imported_modules(tree):
        if module.split(".")[0] in SERIALISERS:
            yield f"imports {module}"
    for node in walked(tree):
        if is_call(node, "eval", "exec", "compile", "__import__"):
            yield f"calls {dotted(node.func)}"
        if is_call(node, "torch.load"):
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if options.get("weights_only") != "True":
                yield "calls torch.load without weights_only=True"
        if is_call(node, "np.load", "numpy.load"):
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if options.get("allow_pickle") != "False":
                yield "calls np.load without allow_pickle=False"
        if isinstance(node, ast.Call) and any(option.arg == "shell" for option in node.keywords):
            yield "starts a shell"


def test_no_code_comes_from_data():
    found = {str(path.relative_to(PACKAGE)): [*unsafe_things(tree_of(path))] for path in FILES}
    assert {file: things for file, things in found.items() if things} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "eval('1')",
        "torch.load('x')",
        "torch.load('x', weights_only=False)",
        "np.load('x')",
        "np.load('x', allow_pickle=True)",
        "subprocess.run('x', shell=True)",
    ],
)
def test_unsafe_things_are_found(text):
    assert list(unsafe_things(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "import vfl.server.app",
        "from importlib import import_module\nimport_module('vfl.server.app')",
        "ROOMS = {'label': 'vfl.server.app'}",
        "FRONT = 'vfl.server.app:server_app'",
    ],
)
def test_an_arrow_is_found_however_it_is_drawn(text):
    tree = ast.parse(text)
    assert "vfl.server.app" in {*imported_modules(tree), *named_modules(tree)}


def test_sockets_live_in_few_places():
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for module in imported_modules(tree_of(path))
        if module.split(".")[0] in SOCKETS
    }
    indices = tuple(SOCKET_PLACES)
    assert [path for path in sorted(found) if not path.startswith(indices)] == []
    assert [place for place in indices if not any(path.startswith(place) for path in found)] == []
    assert SOCKETS & set(imported_modules(tree_of(PACKAGE / "core/processes.py"))) == {"select"}


def test_one_file_starts_processes():
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if {"subprocess", "multiprocessing"} & set(imported_modules(tree_of(path)))
    }
    assert found == STARTERS.keys()

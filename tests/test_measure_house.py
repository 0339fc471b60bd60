"""`scripts/measure_house` on a package small enough to count by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "scripts" / "measure_house"
FILES = {
    "__init__.py": '"""A house."""\n',
    "one/__init__.py": "from house.one.deep import (\n    NUMBER,\n)\n",
    "one/deep.py": '"""Says a number."""\n\n# because\nNUMBER = 1\n\n\n'
    'def f():\n    "..."\n    return """\n\n"""\n',
    "two.py": "import house.one\n\nfrom house.one import deep\n\nprint(deep, house)\n",
    "long.py": "\n".join(f"x{number} = {number}" for number in range(40)) + "\n",
    "py.typed": "",
}
#: A function of ten lines, and the same under other names.
TWICE = """
def {0}(x, y):
    total = 0
    for each in x:
        if each > y:
            total += each
        else:
            total -= 1
    print(total)
    while total > {1}:
        total //= 2
    return total
"""


def measured(tmp_path, *options, files=FILES):
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = [sys.executable, PROGRAM, "--package", tmp_path / "house", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def test_a_house_is_counted_by_room(tmp_path):
    told = json.loads(measured(tmp_path, "--json"))
    assert told["entries"] == 5
    size = {"files": 2, "lines": 8, "import_lines": 3, "single_importer": 1, "small_files": 2}
    size["repeated_lines"] = 0
    assert told["rooms"]["one"] == {**size, "import_share": 3 / 8}
    size = {"files": 5, "lines": 51, "import_lines": 5, "single_importer": 1, "small_files": 4}
    size["repeated_lines"] = 0
    assert told["rooms"]["all"] == {**size, "import_share": round(5 / 51, 4)}


def test_products_are_counted_apart_and_a_repeated_block_wherever_it_stands(tmp_path):
    files = {
        "core/one.py": TWICE.format("f", 7),
        "shop/product.py": "PRODUCT = 1\n",
        "shop/other.py": "x = 1\n" + TWICE.format("g", 8) + "y = 2\n",
    }
    sizes = json.loads(measured(tmp_path, "--json", files=files))["rooms"]
    assert [sizes[one]["lines"] for one in ("kernel", "products", "all")] == [11, 14, 25]
    assert [sizes[one]["repeated_lines"] for one in ("core", "shop", "all")] == [11, 11, 22]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "most"), [("exchange", 11), ("randtopk", 15), ("train", 57), ("cell", 68)]
)
def test_one_piece_of_work_enters_few_files(work, most):
    words = [sys.executable, PROGRAM, "--entered", work, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    assert 0 < len(found["files"]) <= most
    assert 0 <= found["climbs"] <= found["returns"] < found["stays"] <= len(found["files"])
    assert 0 < found["steps_up"] < len(found["files"])


def test_a_way_is_counted_by_rooms_left_and_floors(tmp_path):
    files = {
        "core/__init__.py": "",
        "core/low.py": "",
        "core/high.py": "from house.core import low\n",
        "hall/__init__.py": "",
        "hall/door.py": "from house.core import high\n",
        "cli.py": "from house.hall import door\n",
    }
    measured(tmp_path, files=files)
    way = ["cli.py", "hall/door.py", "core/low.py", "core/high.py", "hall/door.py", "core/low.py"]
    code = (
        "import json, runpy, sys\n"
        "from dataclasses import asdict\n"
        "from pathlib import Path\n"
        "house = runpy.run_path(sys.argv[1], run_name='measure_house')\n"
        "print(json.dumps(asdict(house['Way'].of(json.loads(sys.argv[3]), Path(sys.argv[2])))))\n"
    )
    words = [sys.executable, "-c", code, str(PROGRAM), str(tmp_path / "house"), json.dumps(way)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    # Up: low to high inside core, core to hall. Returns: to hall, which is higher, and to core.
    assert json.loads(done.stdout) == {"stays": 5, "returns": 2, "climbs": 1, "steps_up": 2}

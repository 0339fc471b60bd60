"""The experiments of the thesis: every file is right, and those for a CPU train."""

from pathlib import Path

import pytest

from vfl.config import Locations, read_experiment
from vfl.core.errors import MissingDataError
from vfl.experiments.comparison import comparison_of
from vfl.experiments.plan import check_specs
from vfl.session.schedule import steps_per_epoch
from vfl.training.run import load_data, session_of

THESIS = Path(__file__).parents[1] / "examples" / "thesis"
#: For a CPU: settings that leave a few batches, and the row shape and classes that are to come.
SMALL = {
    "digit_pairs": (["data.rows=450"], (1, 8, 16), 100),
    "fm20": (["data.rows=700"], (1, 14, 14), 20),
    "tiny_imagenet_32": (["data.rows=150", "train.batch_size=32"], (3, 32, 32), 100),
    "yoochoose_filtered": (["data.rows=1200"], (20,), 5399),
    "review_polarity": (["data.rows=80", "data.length=50"], (50,), 2),
}
FOLDERS = {
    "fm20": "MNIST",
    "tiny_imagenet_32": "tiny-imagenet-200",
    "yoochoose_filtered": "yoochoose1_64",
    "review_polarity": "review-polarity",
}
#: At the thesis' scale: the width of its cut (Table 3.2).
FULL = {
    "cifar100": 128,
    "yoochoose": 300,
    "dbpedia": 600,
    "tiny_imagenet": 1280,
    "tiny_imagenet_pretrained": 1280,
}
#: Attacks on labels, chapter 4, and on pictures, 3.4.4: victims of a grid, and settings that leave
#: little of it.
GRIDS = {
    "labels_mnist": (105, ["data.rows=400"]),
    "labels_mnist_inner": (24, ["data.rows=400"]),
    "labels_width": (10, ["data.rows=400"]),
    "labels_fashion": (27, ["data.rows=150", "train.batch_size=32"]),
    "labels_vit": (18, ["data.rows=150", "train.batch_size=32"]),
    "reconstruction": (15, ["data.rows=150", "train.batch_size=32"]),
}


def file_of(name):
    return THESIS / f"{name}.toml"


def test_every_file_is_tested():
    files = list(THESIS.iterdir())
    assert {path.stem for path in files} == {*SMALL, *FULL, *GRIDS}
    assert max(len(line) for path in files for line in path.read_text().splitlines()) <= 100


@pytest.mark.parametrize("name", SMALL)
def test_those_for_a_cpu_say_what_they_compare(name):
    cells = comparison_of(read_experiment(file_of(name)), Locations()).cells
    assert len({cell.name for cell in cells}) == len(cells)
    assert {"none", "topk:k=3"} & {cell.experiment.codec for cell in cells}


@pytest.mark.parametrize("name", [*SMALL, *FULL])
def test_the_specs_can_be_built_and_the_top_is_one_layer(name):
    experiment = read_experiment(file_of(name))
    check_specs(experiment)
    assert experiment.name == name.replace("_", "-")
    assert (experiment.label.top, experiment.train.keep) == ("linear", "best")
    if name in FULL:
        assert [party.width for party in experiment.parties.values()] == [FULL[name]]
        assert experiment.train.patience == 100


@pytest.mark.parametrize("name", SMALL)
def test_one_for_a_cpu_trains(name, monkeypatch, request):
    if name in FOLDERS:
        root = request.getfixturevalue("data_root")
        monkeypatch.setenv("VFL_DATA", str(root))
        if not (root / FOLDERS[name]).is_dir():
            pytest.skip(f"there is no {FOLDERS[name]} here")
    small, shape, classes = SMALL[name]
    experiment = read_experiment(file_of(name), [*small, "train.epochs=1"])
    data = load_data(experiment)
    assert tuple(data["client"].inputs.shape[1:]) == shape
    assert len(data["server"].classes) == classes
    label = session_of(experiment, data, "train").run().label
    (record,) = label.history
    rows, batch_size = len(data["server"].split.train), experiment.train.batch_size
    assert record["steps"] == steps_per_epoch(rows, batch_size) > 1
    assert ("test_hit_rate" in record) is bool(experiment.label.hits)
    assert 0 < record["test_log_loss"] < 20


@pytest.mark.parametrize("name", FULL)
def test_one_without_its_data_says_where_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VFL_DATA", str(tmp_path))
    with pytest.raises(MissingDataError) as caught:
        load_data(read_experiment(file_of(name)))
    assert caught.value.fix


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_has_its_victims_and_they_train(name, monkeypatch, data_root):
    monkeypatch.setenv("VFL_DATA", str(data_root))
    victims, small = GRIDS[name]
    experiment = read_experiment(file_of(name), [*small, "train.epochs=1"])
    check_specs(experiment)
    assert experiment.name == name.replace("_", "-")
    assert experiment.grid.trained_by == ("owner" if name.startswith("labels") else "split")
    assert len(experiment.grid.victims) * len(experiment.grid.seeds) == victims
    try:
        data = load_data(experiment)
    except MissingDataError as error:
        pytest.skip(str(error.args[0]))
    (record,) = session_of(experiment, data, "train").run().label.history
    assert record["steps"] > 1

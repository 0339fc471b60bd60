"""Which cells a comparison has, and how they are kept."""

import pytest
import torch

from vfl.compression import StepContext, make
from vfl.config import CompareSettings, Experiment, Locations, with_overrides
from vfl.config.run_folder import RunFolder
from vfl.core.errors import (
    BadOptionError,
    ConfigError,
    ExposedCutError,
    RunFolderError,
    SpecError,
    WidthError,
)
from vfl.core.frame import HEADER_BYTES
from vfl.core.seeds import Secret
from vfl.core.storage import read_json
from vfl.experiments import GridFolder, chosen
from vfl.experiments.cells import CODEC
from vfl.experiments.comparison import CutShape, comparison_of, fitted_spec, frame_bytes, plan_lines
from vfl.experiments.glance import of_comparison
from vfl.experiments.results import TEST, TRAINING, Line
from vfl.experiments.scheduler import run_cells


def titles(cells):
    return [cell.title for cell in cells]


def test_one_repeat_is_whole_before_the_next(tiny):
    cells = comparison_of(tiny()).cells
    assert titles(cells) == [
        "none seed=0",
        "topk:k=2 at 20 % seed=0",
        "none seed=1",
        "topk:k=2 at 20 % seed=1",
    ]
    assert [(cell.experiment.codec, cell.experiment.seed) for cell in cells] == [
        ("none", 0),
        ("topk:k=2", 0),
        ("none", 1),
        ("topk:k=2", 1),
    ]
    assert all(cell.experiment.compare is None for cell in cells)


def test_what_does_not_fit_is_left_out_and_told(tiny):
    comparison = comparison_of(tiny(codecs=["none", "size:k=?"], levels=[1, 20], seeds=[0]))
    assert titles(comparison.cells) == ["none seed=0", "size:k=3 at 20 % seed=0"]
    assert comparison.notes == ("size:k=? is left out at 1 %: frames are larger even with 1",)


def test_a_plan_says_the_bytes_of_a_row(tiny):
    head, none, topk, *_ = plan_lines(comparison_of(tiny(seeds=[0])).cells)
    assert head.split() == ["bytes", "a", "row", "of", "dense", "cell"]
    assert none.split()[:2] == ["64.25", "100.39%"]  # 16 x 4 bytes, and 16 over 64 rows
    assert topk.split()[:2] == ["9.12", "14.26%"]  # 2 x 32 + ceil(log2 120) bits, and the header


TWO = {
    "data": {"rows": 400, "validation": 0},
    "merge": "sum",
    "parties": {name: {"width": 16, "bottom": "mlp:hidden=none"} for name in ("left", "right")},
    "train": {"epochs": 1, "optimizer": "sgd", "momentum": 0},
    "compare": {"codecs": ["none"], "seeds": [0]},
}


@pytest.mark.parametrize("secure", ["beaver", "permuted", "pea", "pea:divided=columns"])
def test_where_no_party_has_a_cut_there_is_none_to_compare(secure):
    with pytest.raises(ExposedCutError):
        comparison_of(Experiment.model_validate(TWO | {"secure": secure}))


@pytest.mark.parametrize(
    ("secure", "value_bytes", "error"), [("none", 4, 0), ("sum", 4, 1e-4), ("sum:bits=8", 1, 0.2)]
)
def test_the_cell_of_a_mode_with_cuts_is_measured(written, tmp_path, secure, value_bytes, error):
    folder, cells = written(tmp_path / "grid", Experiment.model_validate(TWO | {"secure": secure}))
    assert run_cells(folder, cells) == []
    measured = read_json(folder.cells_path / cells[0].name / CODEC)["parties"]
    assert set(measured) == {"left", "right"}
    for party in measured.values():
        frames = -(-party["rows"] // party["batch_size"])
        values = party["rows"] * party["width"]
        assert party["wire_bytes"] == frames * HEADER_BYTES + values * value_bytes
        assert error / 100 <= party["relative_error"] <= error
    _, planned = plan_lines(cells)
    assert planned.split()[0] == f"{2 * (16 * value_bytes + HEADER_BYTES / 64):.2f}"


def test_a_codec_that_a_secure_mode_refuses_is_told_before_anything_trains():
    compare = {"codecs": ["none", "topk:k=3"], "seeds": [0]}
    with pytest.raises(ExposedCutError, match="the choice of values to send") as caught:
        comparison_of(Experiment.model_validate(TWO | {"secure": "sum", "compare": compare}))
    assert caught.value.where == "compare.codecs, secure"


@pytest.mark.parametrize(
    ("compare", "error", "where"),
    [
        ({"codecs": ["rate:bits=?"]}, SpecError, "file.toml:3: compare.codecs"),
        (
            {"variants": {"odd": ["train.epoch=1"]}},
            ConfigError,
            "file.toml:5: compare.variants.odd",
        ),
        (
            {"variants": {"odd": ["parties.client.bottom=mpl"]}},
            SpecError,
            "file.toml:5: compare.variants.odd, parties.client.bottom",
        ),
    ],
    ids=["codec", "setting", "spec"],
)
def test_mistakes_name_their_line(tiny, compare, error, where):
    text = "\n[compare]\ncodecs = []\n[compare.variants]\nodd = []\n"
    with pytest.raises(error) as caught:
        comparison_of(tiny(**compare), Locations.of_text("file.toml", text))
    assert caught.value.where == where


def test_a_cells_name_follows_from_its_experiment_alone(tiny):
    one, other = (comparison_of(tiny(**changes)).cells for changes in ({}, {"seeds": [1, 5]}))
    assert one[2].name == other[0].name
    assert len({cell.name for cell in (*one, *other)}) == 6
    longer = with_overrides(tiny(), ["train.epochs=4"])
    assert not {cell.name for cell in comparison_of(longer).cells} & {cell.name for cell in one}


def test_cells_are_read_as_they_were_written(tiny, written, tmp_path):
    folder, cells = written(tmp_path / "grid", tiny())
    again = GridFolder(tmp_path / "grid")
    assert again.cells() == list(cells)
    assert [cell.name for cell in again.cells()] == [cell.name for cell in cells]
    assert again.experiment() == tiny()
    created = folder.head("created")
    written(tmp_path / "grid", tiny(seeds=[0]))
    assert folder.head("created") == created
    assert len(folder.cells()) == 2


def test_cells_are_chosen_by_words(tiny):
    cells = comparison_of(tiny()).cells
    assert titles(chosen(cells, "topk")) == titles([cells[1], cells[3]])
    assert chosen(cells, cells[0].name) == [cells[0]]
    with pytest.raises(ConfigError, match="no cell has this name"):
        chosen(cells, "size")


def test_a_comparison_in_which_nothing_fits_is_refused(tiny):
    with pytest.raises(ConfigError, match="no codec fits any level") as caught:
        comparison_of(tiny(codecs=["size:k=?"], levels=[1]))
    assert caught.value.where == "compare.levels"


def test_other_folders_are_refused(tiny, written, tmp_path):
    with pytest.raises(RunFolderError, match="there is no grid in this folder"):
        GridFolder(tmp_path).cells()
    RunFolder.create(tmp_path / "run", tiny(), "in-process", "vfl train")
    with pytest.raises(RunFolderError, match="this is the folder of a single training"):
        written(tmp_path / "run", tiny())


SPECS = [
    "topk:k=?",
    "topk:k=?,values=8",
    "topk:k=?,packer=bitmap",
    "randtopk:k=?,alpha=0.2,values=4,packer=index",
    "size:k=?",
    "size:k=?,kind=mask,values=4",
    "sign:width=?",
    "topk:k=3,values=?",
    "quantise:values=?",
    "relu:values=?,packer=dense",
]


def plain_frame_bytes(spec, width, rows):
    """Built without the code under test: a cut of the wire's width, whatever it holds."""
    codec = make(spec)
    codec.check(width)
    cut = torch.ones(rows, codec.wire_width(width))
    context = StepContext(training=True, secret=Secret(bytes(32)))
    return HEADER_BYTES + len(codec.encode(cut, context).payload)


def largest(spec, level, width, rows):
    """The number before the first whose frame is too large, by trying one after the other."""
    found = None
    for number in range(1, 32 * width + 1):
        try:
            size = plain_frame_bytes(spec.replace("?", str(number)), width, rows)
        except (BadOptionError, WidthError):
            break
        if size > level / 100 * 4 * rows * width:
            break
        found = number
    return found


@pytest.mark.parametrize("level", [0.5, 60])
@pytest.mark.parametrize("spec", SPECS)
def test_the_largest_number_that_fits(spec, level):
    number = largest(spec, level, width=24, rows=16)
    expected = None if number is None else spec.replace("?", str(number))
    assert fitted_spec(spec, level, CutShape((24,), 16)) == expected


def test_parties_share_a_level():
    cut = CutShape((16, 48), 32)
    spec = fitted_spec("topk:k=?", 10, cut)
    alone = [plain_frame_bytes(spec, width, 32) for width in cut.widths]
    assert frame_bytes(spec, cut) == sum(alone) <= 0.1 * cut.dense_bytes
    assert frame_bytes("topk:k=3", cut) > 0.1 * cut.dense_bytes
    assert spec == "topk:k=2"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("topk:k=?,values=4,packer=range", "depends on the data"),
        ("l1:target=?", "depends on the data"),
        ("rate:bits=?", "depends on the data"),
        ("relu:values=?,packer=bitmap", "depends on the data"),
        ("l1:target=?,packer=dense", "gives no longer frames"),
        ("randtopk:k=3,alpha=?", "gives no longer frames"),
        ("sign:grad=?", "no such choice"),
    ],
)
def test_what_cannot_be_matched_is_refused(spec, reason):
    with pytest.raises(BadOptionError, match=reason):
        fitted_spec(spec, 5, CutShape((24,), 16))


def test_equal_scores_of_all_repeats_decide_that_a_codec_is_worse():
    def line(codec, share, score, reference=None):
        figures = {(TEST, "accuracy"): score, (TRAINING, "wire_ratio_up"): share}
        figures[TRAINING, "wire_ratio_down"] = share
        about = {"method": codec, "codec": codec, "variant": "", "level": ""}
        each = {figure: {"0": value, "1": value} for figure, value in figures.items()}
        return Line(about, ["0", "1"], {}, each, reference)

    plain = line("none", 1.0, 0.9)
    settings = CompareSettings(codecs=("none", "topk:k=1"))
    found = of_comparison(settings, [plain, line("topk:k=1", 0.1, 0.5, plain)], "accuracy")
    assert found.sentence.endswith("Every codec that sends less than none is worse.")

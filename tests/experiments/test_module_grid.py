"""`vfl.compare` and `vfl.grid` on modules that a caller builds and trains."""

import json
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import vfl
from vfl.core.errors import ConfigError, DataError, RunFolderError, UserError
from vfl.experiments.cells import GridFolder
from vfl.experiments.module_grid import Recipe
from vfl.experiments.on_ray import _Remote, grid_of
from vfl.experiments.results import COLUMNS
from vfl.experiments.study import add_attack, train_alone
from vfl.training.run import evaluate

COLUMNS_OF_ROWS, ROWS = 6, 300
EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_attack.py"
ATTACKS = ["logistic", "gradient_similarity"]
QUIET = {"progress": False}
QUICK = {"seeds": [0], "leaks": [5], "draws": 1, "attacks": ["logistic"], "baselines": ["raw"]}


def rows(seed=0):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(ROWS) % 3
    centres = 3 * torch.randn(3, COLUMNS_OF_ROWS, generator=draw)
    return centres[labels] + torch.randn(ROWS, COLUMNS_OF_ROWS, generator=draw), labels


def loaders():
    inputs, labels = rows()
    parts = (slice(0, 200), slice(200, ROWS))
    train, test = (TensorDataset(inputs[part], labels[part]) for part in parts)
    return DataLoader(train, 50, shuffle=True), DataLoader(test, 50)


def build(codec, defense, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(COLUMNS_OF_ROWS, 8), nn.ReLU(), nn.Linear(8, 3))
    example = torch.zeros(2, COLUMNS_OF_ROWS)
    return vfl.split(net, "1", example, codec=codec, defense=defense, seed=seed)


def figure(table, training, measure, subject="test rows"):
    found = table[(table.training == training) & (table.measure == measure)]
    return found[found.subject == subject].value.tolist()


def test_a_comparison_counts_what_its_training_sent(tmp_path):
    train, test = loaders()
    asked = {"codecs": ["none", "topk:k=2"], "seeds": [0, 1], "epochs": 3, "learning_rate": 0.02}
    found = vfl.compare(build, train, test, out=tmp_path, **asked, **QUIET)
    table = found.table
    assert not found.failed
    assert list(table.columns) == COLUMNS
    header, steps = 16, 3 * 4
    cuts = steps * (4 * 50 * 8 + header)
    assert figure(table, "none", "bytes_up", "feature") == [cuts] * 2
    assert figure(table, "none", "bytes_down", "feature") == [cuts] * 2
    assert figure(table, "none", "wire_ratio", "training") == [cuts / (4 * 600 * 8)] * 2
    assert all(
        less < more
        for less, more in zip(
            figure(table, "topk:k=2", "bytes_up", "feature"),
            figure(table, "none", "bytes_up", "feature"),
            strict=True,
        )
    )
    accuracy = table[(table.measure == "accuracy") & (table.subject == "test rows")]
    assert accuracy.value.min() > 0.6
    assert accuracy.guess.between(0.33, 0.35).all()
    assert (tmp_path / "report.html").exists()
    assert "forward" in found.text


def test_the_number_behind_a_codec_is_looked_for(tmp_path):
    train, test = loaders()
    asked = {"codecs": ["none", "topk:k=?"], "levels": [45], "seeds": [0], "epochs": 1}
    table = vfl.compare(build, train, test, out=tmp_path, **asked, **QUIET).table
    assert set(table.codec) == {"none", "topk:k=3"}


def trained_with(count):
    """A loop of the caller's own, which counts how often it ran and averages weights."""

    def loop(model, loader):
        count.append(model.experiment.defense)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = torch.optim.swa_utils.AveragedModel(model)
        for epoch in range(3):
            for inputs, labels in loader:
                answers = model(inputs, labels=labels)
                loss = nn.functional.cross_entropy(answers, labels) + model.extra_loss()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if epoch:
                average.update_parameters(model)
        return average.module

    return loop


def test_a_grid_stands_beside_its_guess_and_goes_on_where_it_stopped(tmp_path):
    train, test = loaders()
    ran = []
    asked = {
        "defenses": ["dcor:alpha=0.1"],
        "codecs": ["topk:k=1"],
        "out": tmp_path,
        **QUICK,
        **QUIET,
    }
    found = vfl.grid(build, train, test, fit=trained_with(ran), **asked)
    assert not found.failed
    assert ran == ["none", "dcor:alpha=0.1", "none"]
    table = found.table
    attacks = table[(table.evaluator == "attack") & (table.measure == "accuracy")]
    assert set(attacks.training) == {"none", "dcor:alpha=0.1", "topk:k=1"}
    assert attacks.guess.between(0.3, 0.4).all()
    assert attacks.no_model.notna().all()
    assert set(attacks.stale) == {""}
    again = vfl.grid(build, train, test, fit=trained_with(ran), **asked)
    assert len(ran) == 3, "what is trained stays"
    assert again.table.equals(table)
    more = asked | {"attacks": ["logistic", "kmeans"]}
    wider = vfl.grid(build, train, test, fit=trained_with(ran), **more).table
    assert len(ran) == 3, "an attack more needs no training"
    assert set(wider[wider.evaluator == "attack"].subject) == {"logistic", "kmeans"}
    assert vfl.Results.of(tmp_path).table.equals(wider), "whoever reads needs no function"
    with pytest.raises(RunFolderError, match="modules"):
        add_attack(tmp_path, EXAMPLE)


def test_attacks_on_gradients_are_given_a_recorded_training(tmp_path):
    train, test = loaders()
    ran = []
    asked = {"defenses": ["none"], **QUICK, **QUIET}
    gradients = {"attacks": ATTACKS, "out": tmp_path / "first"}
    found = vfl.grid(build, train, test, fit=trained_with(ran), **asked | gradients)
    assert not found.failed
    assert len(ran) == 1
    later = asked | {"out": tmp_path / "later"}
    vfl.grid(build, train, test, fit=trained_with(ran), **later)
    again = vfl.grid(build, train, test, fit=trained_with(ran), **later | {"attacks": ATTACKS})
    assert len(ran) == 3, "recorded once more, to the same weights"
    kept = [one.table[one.table.evaluator == "attack"].value.tolist() for one in (found, again)]
    assert kept[0] == kept[1]
    vfl.grid(build, train, test, fit=trained_with(ran), **later | {"attacks": ATTACKS})
    assert len(ran) == 3, "scores stay"


def test_a_training_that_cannot_be_repeated_is_not_recorded_later(tmp_path):
    train, test = loaders()
    moved = iter(range(100))

    def loop(model, loader):
        with torch.no_grad():
            model.model[0].bias.add_(next(moved))

    asked = {"defenses": ["none"], "out": tmp_path, **QUICK, **QUIET}
    vfl.grid(build, train, test, fit=loop, **asked)
    found = vfl.grid(build, train, test, fit=loop, **asked | {"attacks": ATTACKS})
    why = "the training was repeated for a recording, but gave other weights"
    assert [one.failure["what"] for one in found.failed] == [why]
    assert f"1 cell failed: none seed=0: {why}" in found.sentence


@pytest.mark.parametrize(
    "ask", [lambda run: run.attack("logistic"), lambda run: evaluate(run.folder)]
)
def test_commands_for_runs_say_who_made_a_module(tmp_path, ask):
    train, test = loaders()
    asked = {"codecs": ["none"], "seeds": [0], "epochs": 1, "out": tmp_path, **QUIET}
    vfl.compare(build, train, test, **asked)
    (path,) = (tmp_path / "cells").iterdir()
    run = vfl.Run(path)
    assert "own" in run.page.read_text()
    with pytest.raises(RunFolderError, match="a caller's functions"):
        ask(run)
    with pytest.raises(RunFolderError, match="a caller's functions"):
        train_alone(tmp_path)


def test_other_rows_or_code_train_anew(tmp_path):
    ran = []
    train, test = loaders()
    asked = {"codecs": ["none"], "seeds": [0], "out": tmp_path, **QUIET}
    vfl.compare(build, train, test, fit=trained_with(ran), **asked)
    shuffled = DataLoader(train.dataset, 40, shuffle=True, generator=torch.Generator())
    vfl.compare(build, shuffled, test, fit=trained_with(ran), **asked)
    assert len(ran) == 2, "another batch size is another experiment"
    batches = [(inputs + 1, labels) for inputs, labels in train]
    vfl.compare(build, batches, test, fit=trained_with(ran), **asked)
    assert len(ran) == 3, "other rows"
    for answer, trained in ((8, 4), (8, 4), (9, 5)):
        vfl.compare(in_a_notebook(answer), batches, test, fit=trained_with(ran), **asked)
        assert len(ran) == trained, "a cell that runs again is the same code"
    assert len(list((tmp_path / "stale").glob("*/*"))) == 3


def in_a_notebook(number):
    """`build` with code that no file holds."""
    names = {"__name__": "a_notebook", "made": build}
    exec(
        f"def build(codec, defense, seed, number={number}): return made(codec, defense, seed)",
        names,
    )
    return names["build"]


def test_processes_train_the_same(tmp_path, monkeypatch, quick_processes):
    module = tmp_path / "recipe_of_a_student.py"
    module.write_text(
        textwrap.dedent("""
            import torch
            import vfl
            from torch import nn

            def build(codec, defense, seed):
                torch.manual_seed(seed)
                net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
                made = {"codec": codec, "defense": defense, "seed": seed}
                return vfl.split(net, "1", torch.zeros(2, 6), **made)

            def batches(seed):
                draw = torch.Generator().manual_seed(seed)
                labels = torch.arange(60) % 3
                inputs = torch.eye(6)[labels] + 0.1 * torch.randn(60, 6, generator=draw)
                return list(zip(inputs.split(10), labels.split(10)))
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    asked = {"codecs": ["none", "topk:k=2"], "seeds": [0], "epochs": 2, **QUIET}
    build, batches = "recipe_of_a_student:build", "recipe_of_a_student:batches"
    apart = vfl.compare(build, batches, jobs=2, out=tmp_path / "apart", **asked)
    assert not apart.failed
    here = vfl.compare(build, batches, out=tmp_path / "here", **asked)
    for name in ("accuracy", "bytes_up", "log_loss"):
        kept = [one.table[one.table.measure == name].value.tolist() for one in (apart, here)]
        assert kept[0] == kept[1]
    head = json.loads((tmp_path / "apart" / "grid.json").read_text())
    assert head["modules"]["names"] == {"build": build, "loader": batches}


def test_a_worker_of_a_cluster_trains_the_same_in_a_folder_of_its_own(tmp_path, monkeypatch):
    """What an actor of Ray does with the files that it is sent; Ray itself is not asked."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "recipe_elsewhere.py").write_text(
        textwrap.dedent("""
            import torch
            import vfl
            from torch import nn

            def build(codec, defense, seed):
                torch.manual_seed(seed)
                net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
                made = {"codec": codec, "defense": defense, "seed": seed}
                return vfl.split(net, "1", torch.zeros(2, 6), **made)

            def batches(seed):
                labels = torch.arange(60) % 3
                return list(zip(torch.eye(6)[labels].split(10), labels.split(10)))
        """)
    )
    how = {"train": {"epochs": 2, "optimizer": "adamw", "warmup_steps": 3}, **QUIET}
    named = "recipe_elsewhere:build", "recipe_elsewhere:batches"
    here = vfl.compare(*named, codecs=["none", "topk:k=2"], seeds=[0], out=tmp_path / "here", **how)
    folder = GridFolder(here.path)
    cells = folder.cells()
    assert len(cells) == 2
    for cell in cells:
        _, _, files = _Remote("cpu").run(cell.name, grid_of(folder, cell), None)
        (summary,) = (one for name, one in files.items() if name.endswith("summary.json"))
        mine = json.loads((here.path / "cells" / cell.name / "summary.json").read_text())
        assert json.loads(summary)["weights_sha256"] == mine["weights_sha256"]


def test_functions_of_a_notebook_train_here_alone(tmp_path):
    train, test = loaders()
    with pytest.raises(ConfigError, match="by name") as caught:
        vfl.compare(build, train, test, codecs=["none"], jobs=2, out=tmp_path, **QUIET)
    assert "loader, test" in caught.value.got
    with pytest.raises(UserError, match="notebook"):
        Recipe.of_record(Recipe.of(build, train, test).record)


@pytest.mark.parametrize(
    ("made", "given", "options", "error", "words"),
    [
        (lambda c, d, s: build("none", d, s), None, {}, ConfigError, "settings differ"),
        (lambda c, d, s: nn.Linear(2, 2), None, {}, DataError, "not a split module"),
        (build, iter([]), {}, DataError, "again in each epoch"),
        (build, [], {}, DataError, "training rows and test rows"),
        (build, None, {"codecs": ["no_codec"]}, UserError, "no codec is called"),
        (build, None, {"defenses": ["no_defense"]}, UserError, "no defense is called"),
        (build, None, {"folds": 3, "seeds": None}, ConfigError, "has no effect"),
        ("no_such_module:build", None, {}, ConfigError, "no function has that name"),
        (build, None, {"train": {"patience": 3}}, ConfigError, "need validation rows"),
        (build, None, {"train": {"keep": "best"}}, ConfigError, "need validation rows"),
        (build, None, {"fit": print, "epochs": 3}, ConfigError, "your own function trains"),
        (build, None, {"loss": nn.CrossEntropyLoss()}, ConfigError, "a loss is given by its spec"),
        (build, None, {"loss": "crossentropy"}, UserError, "no loss is called"),
    ],
    ids=lambda one: one if isinstance(one, str) else None,
)
def test_what_cannot_be_compared_is_refused_before_anything_trains(
    tmp_path, made, given, options, error, words
):
    loader, test = loaders() if given is None else (given, None)
    asked = {"codecs": ["topk:k=2"], "seeds": [0], "out": tmp_path, **QUIET, **options}
    with pytest.raises(error, match=words):
        vfl.compare(made, loader, test, **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        ((build, "loader", "test", "codec=none"), {}, UserError, "trained on one loader"),
        ((lambda codec: None, "loader", "test"), {}, ConfigError, "codec, defense and seed"),
        ((build, "tokens", "tokens"), {}, DataError, "a label for each row"),
    ],
)
def test_calls_that_mean_nothing_are_refused(tmp_path, given, options, error, words):
    inputs, labels = rows()
    train, test = loaders()
    stand_for = {"loader": train, "test": test, "tokens": [(inputs, labels[:, None].repeat(1, 4))]}
    given = [stand_for.get(one, one) if isinstance(one, str) else one for one in given]
    with pytest.raises(error, match=words):
        vfl.grid(*given, out=tmp_path, **QUICK, **QUIET, **options)
    assert not list(tmp_path.iterdir())


def fails(codec, defense, seed):
    raise ValueError("17.5 is a value of a row")


@pytest.mark.parametrize("role", ["build", "loader"])
def test_an_error_of_the_callers_function_names_its_line_and_is_the_cause(tmp_path, role):
    given = {"build": (fails, *loaders()), "loader": (build, lambda seed: fails(1, 2, seed))}
    with pytest.raises(UserError, match=f"gave as {role} ended with an error") as caught:
        vfl.compare(*given[role], codecs=["topk:k=2"], seeds=[0], out=tmp_path, **QUIET)
    line = fails.__code__.co_firstlineno + 1
    assert caught.value.where == f"{__file__}:{line} in fails"
    assert isinstance(caught.value.__cause__, ValueError)
    assert "17.5" not in str(caught.value)


def towers(codec, defense, seed):
    bottoms = {name: nn.Linear(COLUMNS_OF_ROWS, 4) for name in ("bank", "shop")}
    codecs = {"bank": "quantise:values=4", "shop": codec}
    widths = dict.fromkeys(bottoms, 4)
    return vfl.SplitModule(
        bottoms, nn.Linear(8, 3), widths, codec=codecs, defense=defense, seed=seed
    )


def test_a_table_says_the_codec_of_each_party(tmp_path):
    train, test = ([((x, x), y) for x, y in one] for one in loaders())
    found = vfl.grid(towers, train, test, epochs=1, out=tmp_path, **QUICK, **QUIET).table
    assert set(found.codec) == {"bank: quantise:values=4; shop: none"}
    table = vfl.attack(towers("none", "none", 0), train, test, pack="logistic", leaks=[5],
                       draws=1, baselines=["raw"], **QUIET).table  # fmt: skip
    assert set(table.codec) == {"bank: quantise:values=4; shop: none"}
    with pytest.raises(ConfigError, match="settings differ from the requested") as caught:
        vfl.compare(
            lambda codec, defense, seed: towers("none", defense, seed),
            train, test, codecs=["topk:k=2"], seeds=[0], out=tmp_path / "other", **QUIET,
        )  # fmt: skip
    assert "bank: quantise:values=4; shop: none" in caught.value.got


@pytest.mark.parametrize("ends_with", [lambda model: [{"epoch": 1}], AveragedModel])
def test_a_loop_may_return_its_history_or_a_wrapped_module(tmp_path, ends_with):
    train, test = loaders()
    asked = {"defenses": ["none"], "out": tmp_path, **QUICK, **QUIET}
    found = vfl.grid(build, train, test, fit=lambda model, loader: ends_with(model), **asked)
    assert not found.failed


def wide(width, codec, defense, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(COLUMNS_OF_ROWS, width), nn.Linear(width, 3))
    example = torch.zeros(2, COLUMNS_OF_ROWS)
    return vfl.split(net, "0", example, codec=codec, defense=defense, seed=seed)


class Wide:
    def __init__(self, width):
        self.width = width

    def __call__(self, codec, defense, seed):
        return wide(self.width, codec, defense, seed)

    def built(self, codec, defense, seed):
        return self(codec, defense, seed)


@pytest.mark.parametrize(
    "of", [lambda width: partial(wide, width), Wide, lambda width: Wide(width).built]
)
def test_values_of_a_builder_count_as_its_code(of):
    built = [Recipe.of(of(width), [], []).built() for width in (918273, 918273, 5)]
    assert built[0] == built[1] != built[2]
    assert "918273" not in built[0]  # what a builder holds may be rows


@pytest.mark.parametrize("several", [False, True], ids=["one logit", "several"])
def test_labels_of_a_binary_loss_are_classes(tmp_path, several):
    inputs, labels = rows()
    of_one = nn.functional.one_hot(labels).float() if several else (labels == 1).float()

    def of_logits(codec, defense, seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(COLUMNS_OF_ROWS, 8), nn.Linear(8, 3 if several else 1))
        return vfl.split(net, "0", inputs[:2], codec=codec, defense=defense, seed=seed)

    def loop(model, loader):
        vfl.fit(
            model, loader, epochs=20, learning_rate=0.02,
            loss=lambda outputs, of: nn.functional.binary_cross_entropy_with_logits(
                outputs.reshape(of.shape), of
            ),
        )  # fmt: skip

    batches = list(zip(inputs.split(50), of_one.split(50), strict=True))
    asked = {"out": tmp_path, "fit": loop, **QUIET}
    compared = vfl.compare(of_logits, batches, codecs=["none"], seeds=[0], **asked)
    assert not compared.failed
    assert figure(compared.table, "none", "auc")[0] > 0.9


def test_a_model_with_a_label_a_token_is_compared_by_its_loss(tmp_path):
    words = torch.randint(0, 9, (40, 5), generator=torch.Generator().manual_seed(0))

    def of_words(codec, defense, seed):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
        return vfl.split(net, "0", words[:2], row_axes=2, codec=codec, defense=defense, seed=seed)

    batches = [(one, one) for one in words.split(10)]
    asked = {"codecs": ["none", "topk:k=1"], "seeds": [0], "epochs": 1, "out": tmp_path, **QUIET}
    found = vfl.compare(of_words, batches, **asked)
    assert not found.failed
    assert found.sentence.startswith("With none the test loss is ")


def test_every_fifth_batch_is_held_out_without_test_rows(tmp_path):
    inputs, labels = rows()
    batches = list(zip(inputs.split(30), labels.split(30), strict=True))
    table = vfl.compare(
        build, batches, codecs=["none"], seeds=[0], epochs=1, out=tmp_path, **QUIET
    ).table
    assert figure(table, "none", "train_rows", "training") == [240]
    assert figure(table, "none", "test_rows", "training") == [60]


def test_defenses_of_a_comparison_are_trained_with_every_codec(tmp_path):
    train, test = loaders()
    asked = {"codecs": ["none", "topk:k=2"], "defenses": ["none", "dcor:alpha=0.1"], "seeds": [0]}
    table = vfl.compare(build, train, test, epochs=1, out=tmp_path, **asked, **QUIET).table
    assert len(set(zip(table.codec, table.defense, strict=True))) == 4

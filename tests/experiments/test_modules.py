"""`vfl.attack` on modules that their caller trained."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import vfl
from vfl.core.errors import DataError, TooFewRowsError, UserError

ROWS, COLUMNS = 240, 6
QUICK = {"draws": 1, "leaks": [5], "baselines": ["raw"], "progress": False}


def rows():
    """Three classes around three points, which no attack misses."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(ROWS) % 3
    centres = 4 * torch.randn(3, COLUMNS, generator=draw)
    return centres[labels] + torch.randn(ROWS, COLUMNS, generator=draw), labels


def loaders(*inputs, batch_size=50):
    labels = rows()[1]
    whole = TensorDataset(*inputs, labels)
    first, second = range(0, 160), range(160, ROWS)
    parts = (torch.utils.data.Subset(whole, part) for part in (first, second))
    return [DataLoader(part, batch_size) for part in parts]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, 8), nn.ReLU(), nn.Linear(8, 3))


def headline(found):
    table = found.table
    return table[table.measure.isin(["accuracy", "matched_accuracy"])]


@pytest.mark.parametrize("joined", [False, True], ids=["split", "SplitModule"])
def test_an_attack_reads_what_crosses(joined):
    inputs, _ = rows()
    train, test = loaders(inputs)
    net = network()
    model = vfl.split(net, "1", inputs[:2])
    if joined:
        model = vfl.SplitModule({"feature": net[:2]}, net[2:], {"feature": 8})
        train, test = ([({"feature": x}, y) for x, y in one] for one in (train, test))
    before = {name: one.clone() for name, one in net.state_dict().items()}
    found = headline(
        vfl.attack(model, train, test, pack=["logistic", "logistic:at=bottom"], **QUICK)
    )
    assert set(found.subject) == {"logistic", "logistic:at=bottom"}
    assert (found.value > 0.9).all()
    assert found.guess.between(0.3, 0.4).all()
    assert (found.no_model > 0.9).all(), "these classes need no model"
    assert model.training
    assert model.ledger.total_bytes("up") == 0, "an attack is no traffic of the module's"
    assert all(torch.equal(before[name], one) for name, one in net.state_dict().items())


def test_a_codec_hides_what_it_does_not_send():
    """With everything but one unit left out, the cut tells less than the bottom does."""
    inputs, _ = rows()
    train, test = loaders(inputs)
    model = vfl.split(network(), "1", inputs[:2], codec="quantise:values=1")
    found = headline(
        vfl.attack(model, train, test, pack=["logistic", "logistic:at=bottom"], **QUICK)
    )
    by_attack = found.set_index("subject").value
    assert by_attack["logistic"] < by_attack["logistic:at=bottom"]


class Towers(nn.Module):
    """A picture and a table; the picture's party knows nothing of the table."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU())
        self.table, self.top = nn.Linear(COLUMNS, 8), nn.Linear(26, 3)

    def forward(self, image, table):
        return self.top(torch.cat([self.image(image).flatten(1), self.table(table)], 1))


def test_each_party_attacks_with_its_own():
    inputs, _ = rows()
    pictures = torch.randn(ROWS, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    at, example = {"hospital": "image", "insurer": "table"}, (pictures[:2], inputs[:2])
    model = vfl.split(Towers(), at, example)
    train, test = loaders(pictures, inputs)
    values = {}
    for party in at:
        found = vfl.attack(model, train, test, pack="logistic:at=bottom", party=party, **QUICK)
        values[party] = headline(found).value.item()
    assert values["insurer"] > 0.9
    assert values["hospital"] < 0.5, "noise"


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(COLUMNS, 8), nn.Linear(8, 3)

    def forward(self, nodes, edges):
        return self.outer(edges @ torch.relu(self.inner(edges @ nodes)))


def test_rows_of_a_graph_are_attacked_by_their_cuts():
    """Edges are no rows: one batch holds all, half of the rows leak and half are attacked."""
    nodes, labels = rows()
    edges = (labels[:, None] == labels).float() / (ROWS / 3)
    torch.manual_seed(0)
    model = vfl.split(Graph(), "inner", (nodes, edges), label_inputs=["edges"])
    loader = [(nodes, edges, labels)]
    found = headline(vfl.attack(model, loader, pack="logistic", **QUICK))
    assert found.value.item() > 0.9
    with pytest.raises(UserError, match="values that no party of this module has") as caught:
        vfl.attack(model, loader, pack=["logistic", "logistic:at=bottom"], **QUICK)
    assert caught.value.fix == "pack=['logistic']"
    packed = vfl.attack(model, loader, pack="light", **QUICK).table
    assert "logistic" in set(packed.subject)
    assert "fine_tuning:at=before" not in set(packed.subject), "its layers need all rows"


OF_COLUMNS = ["inversion:steps=300", "sdar:steps=5", "unsplit:rounds=2", "attribute"]


@pytest.mark.parametrize("joined", [False, True], ids=["split", "SplitModule"])
def test_the_label_party_looks_for_columns(joined):
    inputs, _ = rows()
    train, test = loaders(inputs)
    model = vfl.split(network(), "1", inputs[:2], codec="quantise:values=8")
    if joined:
        net = network()
        model = vfl.SplitModule({"feature": net[:2]}, net[2:], {"feature": 8})
        train, test = ([({"feature": x}, y) for x, y in one] for one in (train, test))
    with vfl.record(model) as trace:
        for given, labels in train:
            nn.functional.cross_entropy(model(given), labels).backward()
    asked = {"draws": 1, "leaks": [5], "known_columns": 60, "progress": False}
    pack = [*OF_COLUMNS, "averaging:of=inversion,over=epochs"]
    table = vfl.attack(model, train, test, pack=pack, trace=trace, **asked).table
    of_rows = table[table.measure == "mse"].set_index("subject")
    assert of_rows.value["inversion:steps=300"] < 0.1 * of_rows.guess["inversion:steps=300"]
    assert set(OF_COLUMNS) <= set(table.subject)
    assert table[table.measure == "attribute_auc"].value.item() > 0.7
    assert table[table.subject == pack[-1]].access.item() == "gradients"


def test_in_a_u_shape_the_server_looks_for_labels_and_columns():
    inputs, _ = rows()
    train, test = loaders(inputs)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(COLUMNS, 8), nn.ReLU(), nn.Linear(8, 5), nn.Linear(5, 3))
    model = vfl.split(net, ["1", "2"], inputs[:2])
    with vfl.record(model) as trace:
        vfl.fit(model, train, epochs=1)
    pack = ["logistic", "gradient_similarity"]
    found = vfl.attack(model, train, test, pack=pack, party="server", trace=trace, **QUICK)
    values = headline(found).set_index("subject").value
    assert values["logistic"] > 0.9
    assert values["gradient_similarity"] > 0.9
    found = vfl.attack(model, train, test, pack="inversion:steps=300", **QUICK)
    errors = found.table[found.table.measure == "mse"]
    assert (errors.value < 0.2 * errors.guess).all()
    for pack, party in (("logistic", "feature"), ("inversion", "server")):
        with pytest.raises(UserError, match="the feature party has the labels"):
            vfl.attack(model, train, test, pack=pack, party=party, **QUICK)


def test_sdar_simulates_the_last_layers_of_a_u_shape():
    inputs, _ = rows()
    train, test = loaders(inputs)
    torch.manual_seed(0)
    net = nn.Sequential(nn.PReLU(), nn.Linear(COLUMNS, 5), nn.Linear(5, 3))
    model = vfl.split(net, ["0", "1"], inputs[:2])
    vfl.fit(model, train, epochs=5, learning_rate=0.01)
    pack = [
        "sdar_labels:steps=300,learning_rate=0.01",
        "sdar:steps=300,learning_rate=0.01,labels=no",
    ]
    found = vfl.attack(model, train, test, pack=pack, known_columns=100, **QUICK)
    assert headline(found).value.item() > 0.8
    errors = found.table[found.table.measure == "mse"]
    assert (errors.value < 0.6 * errors.guess).all()
    assert "its own layers between the two cuts" in found.rows[0].threat
    for spec, of in ((pack[0], vfl.split(net, "1", inputs[:2])), ("sdar", model)):
        with pytest.raises(UserError, match="no party of this module has"):
            vfl.attack(of, train, test, pack=spec, **QUICK)


def test_layers_that_read_more_than_a_cut_are_no_top_of_an_attack():
    inputs, _ = rows()
    pictures = torch.randn(ROWS, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    at = {"hospital": "image", "insurer": "table"}
    model = vfl.split(Towers(), at, (pictures[:2], inputs[:2]))
    train, test = loaders(pictures, inputs)
    found = vfl.attack(model, train, test, pack="inversion:steps=300", party="insurer", **QUICK)
    errors = found.table[found.table.measure == "mse"]
    assert (errors.value < 0.5 * errors.guess).all()
    with pytest.raises(UserError, match="values that no party of this module has") as caught:
        vfl.attack(model, train, test, pack="sdar", party="insurer", **QUICK)
    assert "top" in caught.value.want


def test_scores_are_kept_in_a_folder(tmp_path, monkeypatch):
    inputs, _ = rows()
    train, test = loaders(inputs)
    model = vfl.split(network(), "1", inputs[:2])
    first = vfl.attack(model, train, test, pack="logistic", out=tmp_path, **QUICK)
    monkeypatch.setattr("vfl.attacks.labels.classifiers.Logistic.run", None)
    again = vfl.attack(model, train, test, pack="logistic", out=tmp_path, **QUICK)
    assert again.table.equals(first.table)
    with torch.no_grad():
        model.model[0].weight.mul_(2)
    with pytest.raises(TypeError):  # other weights are attacked anew
        vfl.attack(model, train, test, pack="logistic", out=tmp_path, **QUICK)


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, compiled])
def test_a_wrapped_module_is_attacked(wrap):
    inputs, _ = rows()
    train, test = loaders(inputs)
    model = vfl.split(network(), "1", inputs[:2])
    plain, wrapped = (
        vfl.attack(one, train, test, pack="logistic", **QUICK).table.value.tolist()
        for one in (model, wrap(model))
    )
    assert plain == wrapped


def test_a_module_with_a_split_module_in_it_is_told_where():
    inputs, _ = rows()
    model = nn.ModuleDict({"net": vfl.split(network(), "1", inputs[:2])})
    with pytest.raises(DataError, match="not a split module") as caught:
        vfl.attack(model, *loaders(inputs), **QUICK)
    assert "model.net" in caught.value.fix
    with pytest.raises(DataError, match="not a split module"):
        vfl.attack(network(), *loaders(inputs), **QUICK)


def test_whole_numbers_as_floats_are_classes():
    inputs, labels = rows()
    of_one = (labels == 1).float()[:, None]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(COLUMNS, 8), nn.ReLU(), nn.Linear(8, 1))
    model = vfl.SplitModule({"feature": net[:2]}, net[2:], {"feature": 8})
    train, test = ([({"feature": inputs[at]}, of_one[at])] for at in (range(160), range(160, ROWS)))
    found = headline_of(vfl.attack(model, train, test, pack="light", **QUICK))
    assert (found.value > 0.9).all()
    with pytest.raises(DataError, match="task='regression'"):
        vfl.attack(model, [(one, of + 0.5) for one, of in train], test, **QUICK)


def headline_of(found):
    return found.table[found.table.measure.isin(["auc", "matched_auc"])]


@pytest.mark.parametrize("joined", [False, True], ids=["split", "SplitModule"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_layers_of_another_precision_are_attacked(dtype, joined):
    inputs, _ = rows()
    net = network().to(dtype)
    model = vfl.split(net, "1", inputs[:2].to(dtype))
    train, test = loaders(inputs.to(dtype))
    if joined:
        model = vfl.SplitModule({"feature": net[:2]}, net[2:], {"feature": 8})
        train, test = ([({"feature": x}, y) for x, y in one] for one in (train, test))
    pack = ["logistic:at=bottom", "fine_tuning", "fine_tuning:at=before"]
    found = headline(vfl.attack(model, train, test, pack=pack, **QUICK))
    assert (found.value > 0.9).all()
    errors = vfl.attack(model, train, test, pack="pseudo_client:steps=5", **QUICK).table
    assert errors.measure.item() == "mse"


def test_words_are_attacked_by_the_whole_pack():
    _, labels = rows()
    words = 3 * torch.randint(0, 3, (ROWS, 4), generator=torch.Generator().manual_seed(0))
    words += labels[:, None]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Embedding(9, 4), nn.Flatten()), nn.Linear(16, 3))
    model = vfl.split(net.bfloat16(), "0", words[:2])
    train, test = loaders(words)
    found = headline(vfl.attack(model, train, test, pack="light", **QUICK))
    assert found.value.max() > 0.8


def test_what_the_attacker_does_not_hold_is_refused():
    inputs, labels = rows()
    train, test = loaders(inputs)
    model = vfl.split(network(), "1", inputs[:2])
    with pytest.raises(UserError, match="gradient_norm needs a recorded training"):
        vfl.attack(model, train, test, pack="gradient_norm", **QUICK)
    with pytest.raises(UserError, match="needs a loader of rows"):
        vfl.attack(model)
    with pytest.raises(TooFewRowsError):
        vfl.attack(model, train, test, pack="logistic", **QUICK | {"leaks": [99]})
    with pytest.raises(DataError, match="no labels"):
        vfl.attack(model, [inputs], pack="logistic", **QUICK)
    with pytest.raises(DataError, match="a label for each row"):
        vfl.attack(model, [(inputs, labels[:-1])], pack="logistic", **QUICK)

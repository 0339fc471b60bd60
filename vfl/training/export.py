"""Export of one party's part of a model for other programs, as ONNX or with `torch.export`.

Models other than neural networks have their own export formats, which `SecureMode.exports` lists.

The export of a party's part needs no files of other parties. The exported file computes the same
function as the party's part of the model in predictions. The file of a feature party does not
contain the codec, which would convert the cut to bytes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl.clients import FeatureParty
from vfl.clients.feature_party import own_bottom
from vfl.compression import StepContext
from vfl.config.run_folder import RunFolder
from vfl.config.validate import check_one_label_party
from vfl.core.errors import MissingPackageError, RunFolderError, SpecError
from vfl.core.registry import named
from vfl.core.seeds import Secret, generator
from vfl.core.storage import joint_digest, weights_digest, write_bytes, write_json, write_text
from vfl.datasets import PartyData
from vfl.datasets.split import Split
from vfl.session import FeatureEnd, PartyFolder, Terms
from vfl.session.exchange import SUM, Own
from vfl.session.label import LabelParty, Objective
from vfl.session.label.calibration import Calibration
from vfl.session.label.task import Task
from vfl.session.secure_mode import label_parties, make, shared_bottom_error, shares_weights
from vfl.transport.link import local_pair

# ONNX Runtime 1.29 and later send telemetry unless this variable is set before the import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

#: Largest accepted difference between the outputs of an exported file and of torch; the two sum
#: float32 values in different orders.
TOLERANCE = 1e-4
_ROWS = 7
_FORMS = ("onnx", "torch")  # of networks


def export_half(
    run: Path,
    party: str,
    to: str,
    out: Path | None,
    bottom: str | None = None,
) -> dict[str, Any]:
    """Export one party's part of a model, with its model card and data encoder.

    Args:
        run: folder of the run.
        party: party that owns the exported part.
        to: "onnx" or "torch" for a neural network; other models have other formats.
        out: destination folder; None uses a folder next to the weights.
        bottom: spec of the party's own bottom model, if the party file sets one.

    Returns:
        A record: the paths of the written files, the names of inputs and output, and the largest
        difference of the outputs from torch's outputs on random inputs, relative to the largest
        output. The difference is None if the runtime that would compute the file is not installed.

    Raises:
        RunFolderError: the party's part is missing or damaged, or belongs to another run.
        MissingPackageError: the format needs a package that is not installed.
        SpecError: the weights are secret-shared, the format cannot represent the part, outputs
            depend on the party's secret, or the file computes other outputs.
        ConfigError: a middle party's part cannot be exported.
    """
    own = PartyFolder(run / "parties" / party)
    if (written := _in_own_form(run, own, to, out)) is not None:
        return written
    if to == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise MissingPackageError(
            "an export as ONNX needs packages that are not installed",
            want="onnx and onnxscript",
            fix="pip install 'vfl[onnx]', or --to torch",
        )
    half = _half(run, own, bottom).eval()
    names, sample = list(half.inputs), half.sample()
    target = out or own.path / "export"
    path = target / f"{half.stem}.{'onnx' if to == 'onnx' else 'pt2'}"
    with torch.no_grad():
        expected = half(*sample)
        program = _program(half, sample)
        found = program.module()(*sample) if to == "torch" else None
    with tempfile.TemporaryDirectory() as aside:  # files readable only by their owner
        draft = Path(aside) / path.name
        if to == "onnx":
            _to_onnx(program, half, sample, draft)
        else:
            program.example_inputs = None  # torch would store these attributes with pickle
            torch.export.save(program, str(draft))
        content = draft.read_bytes()
    write_bytes(path, content)
    if to == "onnx":
        found = _run_onnx(path, names, sample)
    worst = None if found is None else _difference(found, expected)
    if worst is not None and worst > TOLERANCE:
        path.unlink()
        raise SpecError(
            f"the {to} file does not compute the same as the party's model",
            got=f"a relative difference of {worst:.1e}",
            want=f"at most {TOLERANCE:.0e}",
        )
    made = {"half": str(path), "inputs": ", ".join(names), "output": half.output}
    card = {key: value for key, value in own.card().items() if key != "sha256"}
    write_json(target / "card.json", card | {"exported": {**made, "half": path.name}})
    made["card"] = str(target / "card.json")
    if (encoder := own.encoder()) is not None:
        write_text(target / "encoder.json", encoder.to_json() + "\n")
        made["encoder"] = str(target / "encoder.json")
    return made | {"difference": worst}


def _in_own_form(run: Path, own: PartyFolder, to: str, out: Path | None) -> dict[str, Any] | None:
    """Export a model other than a neural network in its own format; None for a neural network.

    Raises:
        SpecError: the party's part of the model cannot be exported in this format.
    """
    terms = own.terms()
    forms = make(terms.secure).exports
    if not forms and to in _FORMS:
        return None
    if to not in forms:
        raise SpecError(
            "this kind of model is exported in another format",
            where="--to",
            got=to,
            want=" or ".join(forms or _FORMS),
        )
    _check_run(run, terms, own, own.weights())
    target = out or own.path / "export"
    made: dict[str, Any] = named(forms[to])(run, own, target)
    if own.path.name == terms.label_party and (calibration := _calibration(run, own)) is not None:
        write_json(target / "calibration.json", calibration.record())
        made["calibration"] = str(target / "calibration.json")
    return made


def _calibration(run: Path, own: PartyFolder) -> Calibration | None:
    """Return the calibration of the label party's probabilities; None without one."""
    label, classes = RunFolder.open(run).experiment().label, own.classes()
    task = Objective.of(label, 1 if classes is None else len(classes)).make_task()
    if task.calibration is not None:
        weights = own.weights().items()
        task.load_state_dict(
            {name.removeprefix("task."): one for name, one in weights if name.startswith("task.")}
        )
    return task.calibration


class _Half(nn.Module):
    """Module that computes one party's part of a model at inference.

    Attributes:
        inputs: axes of one row of each input, by name of the input.
        output: name of the module's output.
        stem: name of the exported file without its ending.
    """

    inputs: Mapping[str, tuple[int, ...]]
    output: str
    stem: str

    def sample(self) -> tuple[Tensor, ...]:
        """Draw random rows for every input; the rows belong to no party."""
        drawn = generator(0, "export")
        return tuple(torch.randn(_ROWS, *x, generator=drawn) for x in self.inputs.values())


class _FeatureHalf(_Half):
    """Module that maps rows of inputs to the cut that the codec would encode."""

    stem, output = "bottom", "cut"

    def __init__(self, end: FeatureEnd, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.inputs = {"columns": shape}
        self.model, self._defense = end.model, end.defense

    def sample(self) -> tuple[Tensor, ...]:
        """Draw random rows: numbers, or zeros and ones for bottoms of tokens or items."""
        (rows,) = super().sample()
        try:
            self.model["bottom"](rows)
        except SpecError:  # valid for every bottom model of tokens or items
            rows = (rows > 0).float()
        return (rows,)

    def forward(self, columns: Tensor) -> Tensor:
        return self.cut(columns, StepContext())

    def cut(self, columns: Tensor, context: StepContext) -> Tensor:
        """Return the cut; the defense may draw random numbers from the context's secret."""
        cut = self._defense.embedding(self.model["bottom"](columns).float(), context)
        made: Tensor = self.model["codec"](cut) if "codec" in self.model else cut
        return made


class _LabelHalf(_Half):
    """Module that maps decoded cuts, and the label party's own columns if any, to predictions."""

    stem = "top"

    def __init__(self, party: LabelParty, task: Task, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        terms, self.model, self._party = party.terms, party.model, [party]
        masked = terms.masks_cuts
        senders = {SUM: terms.feature_parties[0]} if masked else {x: x for x in party.ends}
        self._names = list(senders)
        self.inputs = {
            f"cut_{'sum' if name == SUM else name}": (
                party.ends[one].wire_width if not masked else terms.parties[one].width,
            )
            for name, one in senders.items()
        }
        if shape is not None:
            self.inputs |= {"columns": shape}
        if task.name == "regression":
            self.output = "predictions in the labels' own units"
        elif task.calibration is None:
            self.output = "logits, one a class"
        else:
            self.output = "logarithms of calibrated probabilities, one a class"

    def forward(self, *values: Tensor) -> Tensor:
        party = self._party[0]
        terms = party.terms
        cuts = dict(zip(self._names, values, strict=False))
        for name in cuts:
            if f"codec-{name}" in self.model:
                cuts[name] = self.model[f"codec-{name}"](cuts[name])
        if "bottom" in self.model:
            cuts[terms.label_party] = self.model["bottom"](values[-1]).float()
        merged = party.merged({x: cuts[x] for x in [*terms.parties, SUM] if x in cuts})
        logits = party._defense.logits(self.model["top"](merged).float(), StepContext())
        answers: Tensor = party._task.calibrated(party._task.answers(logits))
        return answers.float()


def _half(run: Path, own: PartyFolder, bottom: str | None) -> _Half:
    """Return a party's part of the model, with its weights from the end of training.

    Raises:
        RunFolderError: the weights of this party are missing, or belong to another run.
        SpecError: this party has no part of a network, or its outputs depend on the party's secret.
    """
    terms, weights = own.terms(), own.weights()
    _check_run(run, terms, own, weights)
    if shares_weights(terms):
        raise shared_bottom_error(own.path.name)
    terms = terms.model_copy(update={"mode": "predict"})
    shape, name = own.shape(), own.path.name
    inputs = None if shape is None else torch.zeros(0, *shape)
    classes = own.classes()
    data = PartyData(name, inputs, None, classes, Split(), b"")
    mine = Own(Secret(secrets.token_bytes(32)))
    try:
        if name in label_parties(terms):
            return _label_half(RunFolder.open(run), terms, data, mine, weights)
        if name not in terms.parties:
            folder = RunFolder.open(run)
            check_one_label_party(
                folder.experiment(), f"the file of party '{name}', which has the middle,"
            )
        asked = (
            None
            if bottom is None
            else own_bottom(bottom).build(shape or (), terms.parties[name].width)
        )
        end = FeatureParty(data, terms, local_pair()[1], mine, bottom=asked, weights=weights).end
    # torch's error is replaced, because it would list the names and shapes of all weights
    except RuntimeError:
        raise RunFolderError(
            "these weights belong to another model than the run's",
            where=str(own.path),
            fix="name the party's own bottom with --bottom, as its party.toml does",
        ) from None
    if not isinstance(end, FeatureEnd):
        raise shared_bottom_error(name)
    half = _FeatureHalf(end, shape or ())
    _require_no_noise(half, terms)
    return half


def _label_half(
    folder: RunFolder, terms: Terms, data: PartyData, own: Own, weights: Mapping[str, Tensor]
) -> _LabelHalf:
    name, classes = data.name, data.classes
    terms = terms.at_label(name if name in terms.tasks else None)
    links = {one: local_pair()[0] for one in terms.feature_parties}
    if any(key.startswith("missing.") for key in weights):
        data = replace(data, held=dict.fromkeys(links, np.ones(0, dtype=bool)))
    outputs = 1 if classes is None else len(classes)
    objective = Objective.of(folder.experiment().task_of(name), outputs)
    party = LabelParty(data, terms, links, own, objective, weights=weights)
    shape = None if data.inputs is None else tuple(data.inputs.shape[1:])
    return _LabelHalf(party, party._task, shape)


def _require_no_noise(half: _FeatureHalf, terms: Terms) -> None:
    """Raise an error if a feature party's outputs depend on the secret of this party.

    Raises:
        SpecError: they do.
    """
    rows = half.eval().sample()[0]
    drawn = [half.cut(rows, StepContext(secret=Secret(secrets.token_bytes(32)))) for _ in range(2)]
    if not torch.equal(*drawn):
        raise SpecError(
            "this model adds noise to its outputs with the party's secret; a file lacks it",
            got=f"defense = '{terms.defense}'",
            fix="serve it with vfl, or train with noise in training only",
        )


def _check_run(run: Path, terms: Terms, own: PartyFolder, weights: Mapping[str, Tensor]) -> None:
    """Reject weights of another run, if this host has all weights and their joint digest."""
    middle = [] if terms.middle is None else [terms.middle.party]
    everybody = list(dict.fromkeys([*terms.parties, *label_parties(terms), *middle]))
    folders = {name: PartyFolder(own.path.parent / name) for name in everybody}
    if (run / "summary.json").exists() and all(one.path.exists() for one in folders.values()):
        others = {x: one.weights() for x, one in folders.items() if x != own.path.name}
        digests = [(x, weights_digest(state)) for x, state in others.items()]
        own_digest = (own.path.name, weights_digest(weights))
        RunFolder.open(run).check_weights(joint_digest([*digests, own_digest]))


def _program(half: _Half, sample: Sequence[Tensor]) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows")
    axes: Any = [{0: rows} for _ in sample]
    shapes = tuple(axes) if isinstance(half, _FeatureHalf) else (tuple(axes),)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's GRU warns about a list of weights
            return torch.export.export(half, tuple(sample), dynamic_shapes=shapes, strict=False)
    except Exception as problem:
        raise SpecError(
            "this model cannot be exported as a program",
            got=type(problem).__name__,
            fix="a model of torch's own layers, without branches on the values of rows",
        ) from None


def _to_onnx(
    program: torch.export.ExportedProgram, half: _Half, sample: Sequence[Tensor], path: Path
) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about internal parts of torch's exporter
            torch.onnx.export(
                program,
                tuple(sample),
                str(path),
                input_names=list(half.inputs),
                output_names=["cut" if isinstance(half, _FeatureHalf) else "answers"],
                external_data=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as problem:
        raise SpecError(
            "this model has an operation that ONNX lacks",
            got=type(problem).__name__,
            fix="--to torch",
        ) from None


def _run_onnx(path: Path, names: Sequence[str], sample: Sequence[Tensor]) -> Tensor | None:
    if not find_spec("onnxruntime"):
        return None
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    values = {name: one.numpy() for name, one in zip(names, sample, strict=True)}
    return torch.from_numpy(session.run(None, values)[0])


def _difference(found: Tensor, expected: Tensor) -> float:
    largest = max(float(expected.abs().max()), 1e-12)
    return float((found - expected).abs().max()) / largest

"""Baselines: the attack runs again, on a bottom that was made without labels.

If the attack also succeeds on this bottom, its success results from leaked labels, unlabelled rows
and inputs, and not from the trained bottom.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vfl.attacks.base import before_last, key_of, through
from vfl.attacks.scoring import Case
from vfl.attacks.view import Evidence, Grant, GrantedRows, View
from vfl.core.registry import require_choice
from vfl.core.seeds import scoped
from vfl.defenses.components import principal
from vfl.defenses.self_supervision import train_autoencoder

Kind = Literal["raw", "pca", "random", "autoencoder"]
_HIDDEN = 1024  # random features


def label_free(case: Case, kind: Kind, width: int, draw: torch.Generator) -> Case:
    """Return a case with the same rows, leaked labels and targets, but with a label-free bottom.

    Args:
        case: case whose view grants inputs and unlabelled rows, and for "autoencoder" the bottom's
            architecture.
        kind: "raw": the bottom returns the inputs. "pca": the bottom returns the inputs' first
            principal components, fitted on the unlabelled rows. "random": the bottom returns the
            first principal components of random features of the inputs. "autoencoder": the bottom's
            architecture is trained to reconstruct the unlabelled rows, as in the defense
            `label_free:kind=autoencoder`.
        width: width of the cut; "raw" ignores it and uses the inputs' width, "autoencoder" the
            bottom's own width.
        draw: generator from which all random numbers are drawn.

    Raises:
        BadOptionError: `kind` is unknown.
        NotGrantedError: the case lacks a grant that this kind of bottom needs.
    """
    return replace(
        case, view=view_behind(case.view, label_free_bottom(kind, case.view, width, draw))
    )


def view_behind(view: View, bottom: nn.Module, kept: dict[int, Evidence] | None = None) -> View:
    """Return the attacker's view with this bottom in place of the trained bottom of every epoch.

    Args:
        view: grants inputs.
        bottom: a bottom that was made without labels.
        kept: cache of the bottom's outputs for groups of rows; cases that differ only in their
            leaked labels share it.
    """
    made = {} if kept is None else kept

    def own() -> nn.Module:
        return copy.deepcopy(bottom)

    def seen(rows: GrantedRows) -> Evidence:
        inputs = rows.inputs
        if id(inputs) not in made:  # keeps the tensor alive, so its id stays unique
            before = cache(lambda: before_last(bottom, inputs))
            made[id(inputs)] = Evidence(inputs, through(bottom, inputs), before=before)
        return made[id(inputs)]

    held: dict[str, Any] = {"targets": seen(view.targets), "unlabelled": seen(view.unlabelled)}
    if Grant.LEAKED in view.threat.grants:
        inputs, labels = view.leaked.inputs, view.leaked.labels
        held["leaked"] = Evidence(inputs, through(bottom, inputs), labels)
    if Grant.SNAPSHOTS in view.threat.grants:
        held["snapshots"] = [own]
    return view.instead(bottom=own, **held)


def label_free_bottom(kind: Kind, view: View, width: int, draw: torch.Generator) -> nn.Module:
    """Return a bottom fitted on unlabelled rows; see `label_free`."""
    require_choice("kind", kind, get_args(Kind))
    inputs = view.unlabelled.inputs
    if kind == "autoencoder":
        with scoped(key_of(draw)):
            return train_autoencoder(view.new_bottom(), inputs, draw)
    layers: list[nn.Module] = [nn.Flatten()]
    if kind == "random":
        with scoped(key_of(draw)):
            layers += [nn.Linear(inputs[0].numel(), _HIDDEN), nn.ReLU()]
    if kind != "raw":
        layers.append(_components(through(nn.Sequential(*layers), inputs), width))
    return nn.Sequential(*layers)


def _components(rows: Tensor, width: int) -> nn.Linear:
    """Return a layer that computes the first principal components, scaled to mean variance 1."""
    _, variance, directions = principal(rows)
    kept = min(width, len(variance))
    weight = directions[:, :kept].T / variance[:kept].mean().sqrt()
    layer = nn.Linear(rows.shape[1], kept)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(-weight @ rows.mean(0).double())
    return layer

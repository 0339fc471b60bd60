"""Scoring: a case contains the attacker's view, and the true values, which only scoring reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import conv2d, one_hot

from vfl.attacks.base import Attack, Goal, rarest
from vfl.attacks.view import View
from vfl.core.errors import NonFiniteError
from vfl.session.label.scored import Scored


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Return the share of rows whose true class has the largest score.

    Scores have axes (rows, classes), labels have axes (rows,).

    >>> accuracy(torch.tensor([[0.2, 0.8], [0.9, 0.1]]), torch.tensor([1, 1]))
    0.5
    """
    return float((scores.argmax(1) == labels).double().mean())


def balanced_accuracy(scores: Tensor, labels: Tensor) -> float:
    """Return the mean, over classes, of the share of right guesses in the class.

    >>> balanced_accuracy(torch.tensor([[0.9, 0.1]]).expand(4, 2), torch.tensor([0, 0, 0, 1]))
    0.5
    """
    right = (scores.argmax(1) == labels).double()
    own = [right[labels == one] for one in range(int(labels.max()) + 1)]
    return fmean(float(one.mean()) for one in own if len(one))


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Return the mean, over positive rows, of the precision among rows that score at least as high.

    >>> average_precision(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([True, False, True]))
    0.8333333333333333
    """
    counts = _counted(scores, positive).counts[::-1]
    hits = counts[:, 1]
    precision = hits.cumsum() / counts.sum(1).cumsum()
    return float((hits * precision).sum() / hits.sum())


def _counted(scores: Tensor, positive: Tensor) -> Scored:
    """Count the rows at each score, in a twentieth of the time of scikit-learn's curves."""
    return Scored.counted(scores.double().numpy(), positive.numpy())


def matched(clusters: Tensor, labels: Tensor) -> Tensor:
    """Match clusters to classes (thesis eq 4-26); return each row's class, one-hot.

    The Hungarian algorithm finds the best one-to-one matching of clusters and classes. If there are
    more clusters than classes, some clusters are matched to no class.

    Returns:
        Axes (rows, classes or more); each cluster without a class has a further column.
    """
    size = int(max(clusters.max(), labels.max())) + 1
    together = torch.bincount(clusters * size + labels, minlength=size * size).view(size, size)
    rows, columns = linear_sum_assignment(together.numpy(), maximize=True)
    codes = torch.empty(size, dtype=torch.long)
    codes[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return one_hot(codes[clusters], size).double()


def matched_accuracy(clusters: Tensor, labels: Tensor) -> float:
    """Return the share of rows whose cluster is matched to their class; see `matched`.

    >>> matched_accuracy(torch.tensor([1, 1, 0, 0]), torch.tensor([0, 0, 1, 0]))
    0.75
    """
    return accuracy(matched(clusters, labels), labels)


def auc(scores: Tensor, positive: Tensor) -> float:
    """Return the probability that a positive row outscores a negative one; ties count half.

    >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.9]), torch.tensor([False, False, True, True]))
    0.875
    """
    return _counted(scores, positive).auc()


def rate_at(scores: Tensor, positive: Tensor, false_rate: float = 0.01) -> float:
    """Return the share of positive rows that score higher than 1 - `false_rate` of negative rows.

    The share shows if an attacker is certain about a few rows, which an average over rows hides
    (Carlini et al. 2022).

    >>> rate_at(torch.tensor([0.1, 0.4, 0.7, 0.9]), torch.tensor([False, False, True, True]))
    1.0
    """
    others = scores[~positive].double().sort(descending=True).values
    allowed = int(false_rate * len(others))
    threshold = others[allowed] if allowed < len(others) else -torch.inf
    return float((scores[positive].double() > threshold).double().mean())


def mean_squared_error(guess: Tensor, inputs: Tensor) -> float:
    """Return the squared difference of guess and inputs, as a mean over rows and columns.

    >>> mean_squared_error(torch.zeros(2, 3), torch.full((2, 3), 2.0))
    4.0
    """
    return float((guess.double() - inputs.double()).square().mean())


_PADDING = 0


def token_accuracy(guess: Tensor, texts: Tensor) -> float:
    """Return the mean share of right words in a text, without padding (thesis eq 6-5).

    Args:
        guess: guessed words, int64, axes (texts, words).
        texts: the true words, axes (texts, words).

    >>> token_accuracy(torch.tensor([[4, 9], [7, 7]]), torch.tensor([[4, 5], [7, 0]]))
    0.75
    """
    real = texts != _PADDING
    right = ((guess == texts) & real).sum(1).double() / real.sum(1).clamp(min=1)
    return float(right[real.any(1)].mean())


_WINDOW, _SIGMA = 11, 1.5
_K1, _K2 = 0.01, 0.03


def peak_ratio(guess: Tensor, pictures: Tensor) -> float:
    """Return the peak signal-to-noise ratio, 10 log10(R^2 / MSE) decibels, mean over pictures.

    R is the range of the pixels of all true pictures.

    A picture that is guessed exactly counts as 100 dB.

    >>> pictures = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    >>> round(peak_ratio(pictures + 0.1, pictures), 3)
    20.0
    """
    error = (guess.double() - pictures.double()).square().flatten(1).mean(1)
    ratios = 10 * (_range(pictures).square() / error).log10()
    return float(ratios.clamp(max=100).mean())


def structural_similarity(guess: Tensor, pictures: Tensor) -> float:
    """Return the structural similarity (SSIM), a mean over pictures; 1 for perfect guesses.

    Wang et al. 2004, with their Gaussian window of 11 pixels and standard deviation 1.5. Pictures
    smaller than 11 pixels use a smaller window. The mean is over all positions at which the whole
    window lies inside the picture. K1 = 0.01, K2 = 0.03, and R is the range of all true pixels.

    Args:
        guess: guessed pictures, axes (rows, channels, height, width).
        pictures: the true pictures, same axes.
    """
    one, other = (each.double().flatten(0, 1)[:, None] for each in (guess, pictures))
    window = _window(min(_WINDOW, *pictures.shape[2:]))
    mean_one, mean_other = conv2d(one, window), conv2d(other, window)
    spread_one = conv2d(one.square(), window) - mean_one.square()
    spread_other = conv2d(other.square(), window) - mean_other.square()
    together = conv2d(one * other, window) - mean_one * mean_other
    c1, c2 = (_K1 * _range(pictures)) ** 2, (_K2 * _range(pictures)) ** 2
    luminance = (2 * mean_one * mean_other + c1) / (mean_one.square() + mean_other.square() + c1)
    structure = (2 * together + c2) / (spread_one + spread_other + c2)
    return float((luminance * structure).mean())


def _range(pictures: Tensor) -> Tensor:
    return (pictures.max() - pictures.min()).double()


def _window(side: int) -> Tensor:
    """Return the weights of a Gaussian window, which sum to 1, axes (1, 1, side, side)."""
    places = torch.arange(side, dtype=torch.float64) - (side - 1) / 2
    line = torch.exp(-places.square() / (2 * _SIGMA**2))
    line = line / line.sum()
    return torch.outer(line, line)[None, None]


@dataclass(frozen=True, eq=False)
class Case:
    """One victim under one threat model: the attacker's view, and the true values.

    Attributes:
        view: the attacker's view.
        labels: labels of the targets, axes (targets,): class numbers, int64, or numbers of a
            regression, float32.
        inputs: true inputs of the targets, axes (targets, ...), with which a reconstruction is
            compared.
        positive: mask of the targets that the attacker looks for (members, or rows of one class),
            axes (targets,), for attacks with the goal "scores"; see `seeking`.
    """

    view: View
    labels: Tensor | None = None
    inputs: Tensor | None = None
    positive: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """The value of an attack's guess in one measure, and the value of a guess without evidence.

    Attributes:
        measure: name of the measure, such as "accuracy". For guesses of labels, see
            `scores_of_labels` and `scores_of_values`. The main measures of other goals are "auc",
            "mse" and "token_accuracy"; further measures are "tpr_at_1_fpr", "psnr" (in decibels),
            "ssim" and "whole_texts".
        value: the measure's value for the attack's guess.
        guess: the measure's value for the best constant guess; for clusters, its value for a single
            cluster.
    """

    measure: str
    value: float
    guess: float


def seeking(case: Case) -> Case:
    """Return the same case, in which the attacker looks for the rarer class of the training rows.

    For numeric labels, the function returns the case unchanged.

    Raises:
        NotGrantedError: the view does not grant the shares of the classes.
    """
    assert case.labels is not None
    if case.view.classes == 1:
        return case
    return replace(case, positive=case.labels == rarest(case.view.prior))


def attempt(case: Case, attack: Attack, draw: torch.Generator) -> Score:
    """Run an attack with only those grants that it declares, and score its guess.

    Raises:
        NotGrantedError: the attack needs grants that the threat model does not give, so it is not
            run.
        NonFiniteError: the guess contains NaN or Inf.
    """
    return attempt_all(case, attack, draw)[0]


def attempt_all(case: Case, attack: Attack, draw: torch.Generator) -> list[Score]:
    """Run an attack like `attempt`; return the scores in all measures of its goal, main one first.

    Raises:
        NotGrantedError: the attack needs grants that the threat model does not give, so it is not
            run.
        NonFiniteError: the guess contains NaN or Inf.
    """
    return scores_of(case, attack.goal, guess_of(case, attack, draw))


def guess_of(case: Case, attack: Attack, draw: torch.Generator) -> Tensor:
    """Return the guess of an attack that reads a view with only the grants that it declares.

    Raises:
        NotGrantedError: the attack needs grants that the threat model does not give, so it is not
            run.
        NonFiniteError: the guess contains NaN or Inf, which a score would otherwise count as a
            wrong guess.
    """
    found = attack.run(case.view.only(attack.needs), draw)
    if not torch.isfinite(found).all():
        name = type(attack).__name__
        raise NonFiniteError(
            f"the guess of the attack {name} holds NaN or Inf",
            got=f"{int((~torch.isfinite(found)).sum())} of {found.numel()} values",
            want="finite numbers",
            fix="lower its learning_rate, look for huge cuts, or leak rows of every class",
        )
    return found


def scores_of(case: Case, goal: Goal, found: Tensor) -> list[Score]:
    """Return the scores of a guess, one for each measure of the attack's goal."""
    if goal == "labels":
        assert case.labels is not None
        return scores_of_labels(found, case.labels)
    if goal == "values":
        assert case.labels is not None
        return scores_of_values(found, case.labels)
    if goal == "clusters":
        assert case.labels is not None
        each = scores_of_labels(matched(found, case.labels), case.labels)
        return [replace(one, measure=f"matched_{one.measure}") for one in each]
    if goal == "scores":
        assert case.positive is not None
        sure = rate_at(found, case.positive)
        return [Score("auc", auc(found, case.positive), 0.5), Score("tpr_at_1_fpr", sure, 0.01)]
    assert case.inputs is not None
    if goal == "tokens":
        return _words(found, case.inputs[:, : found.shape[1]].long())
    return _reconstruction(found, case.inputs)


def scores_of_labels(scores: Tensor, labels: Tensor) -> list[Score]:
    """Return the scores of guessed labels in each measure, compared with the best blind guess.

    "accuracy": the blind guess is the most frequent class. "balanced_accuracy": the blind guess is
    any constant class. "auc" and "average_precision" are for the rarer of two classes: a blind
    guess reaches 0.5 in the first, and the class's share in the second. With more than two classes,
    both are means over the classes, each against all other classes.

    Args:
        scores: scores of the classes, axes (rows, classes or more); the class with the largest
            score is the guess.
        labels: true class numbers, int64, axes (rows,).
    """
    counts = labels.bincount()
    present = [one for one in range(len(counts)) if counts[one]]
    found = [
        Score("accuracy", accuracy(scores, labels), float(counts.max()) / len(labels)),
        Score("balanced_accuracy", balanced_accuracy(scores, labels), 1 / len(present)),
    ]
    if len(present) < 2:
        return found  # no ranking with a single class
    sought = present
    if len(present) == 2:
        sought = [min(present, key=lambda one: (int(counts[one]), -one))]
    chances = scores.double().log_softmax(1)  # makes rows comparable
    areas = [auc(chances[:, one], labels == one) for one in sought]
    precisions = [average_precision(chances[:, one], labels == one) for one in sought]
    shares = [float(counts[one]) / len(labels) for one in sought]
    return [
        *found,
        Score("auc", fmean(areas), 0.5),
        Score("average_precision", fmean(precisions), fmean(shares)),
    ]


def scores_of_values(values: Tensor, labels: Tensor) -> list[Score]:
    """Return the scores of guessed numbers in each measure, compared with the best constant.

    "r2": the share of the variance that the guess explains; it is below 0 if the mean of the labels
    would be a better guess. The constant guess is this mean, which gives 0. "mae": the mean
    absolute error; the constant guess is the median of the labels.

    >>> [one.measure for one in scores_of_values(torch.ones(2), torch.tensor([0.0, 2.0]))]
    ['r2', 'mae']

    Args:
        values: axes (rows,).
        labels: true numbers, axes (rows,).
    """
    truth, off = labels.double(), labels.double() - values.double()
    away = truth - truth.mean()
    median = truth.quantile(0.5)
    mae = Score("mae", float(off.abs().mean()), float((truth - median).abs().mean()))
    if not away.any():
        return [mae]
    return [Score("r2", 1 - float(off.square().sum() / away.square().sum()), 0.0), mae]


def _reconstruction(found: Tensor, inputs: Tensor) -> list[Score]:
    """Score a reconstruction, compared with the mean row; for pictures, in further measures too."""
    mean = inputs.mean(0, keepdim=True).expand_as(inputs)
    measures: dict[str, Callable[[Tensor, Tensor], float]] = {"mse": mean_squared_error}
    if inputs.dim() == 4:
        measures |= {"psnr": peak_ratio, "ssim": structural_similarity}
    return [
        Score(name, measure(found, inputs), measure(mean, inputs))
        for name, measure in measures.items()
    ]


def _words(found: Tensor, texts: Tensor) -> list[Score]:
    """Score guessed texts, compared with the most frequent word; add the share of exact texts."""
    real = texts != _PADDING
    constant = torch.full_like(texts, int(texts[real].bincount().argmax()))
    whole = ((found == texts) | ~real).all(1).double().mean()
    return [
        Score("token_accuracy", token_accuracy(found, texts), token_accuracy(constant, texts)),
        Score("whole_texts", float(whole), 0.0),
    ]

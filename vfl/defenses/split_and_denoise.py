"""Split-N-Denoise: noise on token vectors, and a layer that corrects a server's noisy answers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from vfl.compression import StepContext
from vfl.core.registry import require, require_range
from vfl.core.seeds import Secret, fingerprint
from vfl.defenses.base import MOST_EPSILON, Defense
from vfl.privacy import PrivacyStatement

_LEAST_ETA = 1e-6
_LEAST_NORM, _MOST_NORM = 1e-6, 1e6
_MOST_HIDDEN = 4096
_HEADS = 4


class Denoiser(nn.Module):
    """Corrects the vectors that the label party returned, from the clean cut and its noise.

    An attention layer lets each returned vector attend to all tokens of its row.

    Args:
        sent: width of a token vector in the cut.
        returned: width of a returned vector.
        hidden: width of the attention layer; a multiple of 4.
    """

    def __init__(self, sent: int, returned: int, hidden: int) -> None:
        super().__init__()
        self.of_tokens, self.of_returned = nn.Linear(2 * sent, hidden), nn.Linear(returned, hidden)
        self.layer = nn.TransformerEncoderLayer(
            hidden, _HEADS, 2 * hidden, dropout=0.0, batch_first=True
        )
        self.last = nn.Linear(hidden, returned)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, returned: Tensor, cut: Tensor, sent: Tensor) -> Tensor:
        """Return corrected vectors, axes as `returned`: (rows, width) or (rows, tokens, width)."""
        tokens = _with_tokens(torch.cat([cut, sent - cut], -1))
        back = _with_tokens(returned)
        read = torch.cat([self.of_returned(back), self.of_tokens(tokens)], 1)
        correction: Tensor = self.last(self.layer(read)[:, : back.shape[1]])
        return returned + correction.reshape(returned.shape)


def _with_tokens(values: Tensor) -> Tensor:
    """Return values with axes (rows, tokens, width); values without a token axis get one token."""
    return (
        values[:, None] if values.dim() == 2 else values.reshape(len(values), -1, values.shape[-1])
    )


class SplitAndDenoise(Defense):
    """Adds noise to each row of the cut; in a U-shape, the feature party corrects returned cuts.

    The noise n of a row has a density proportional to exp(-eta |n|). Each noisy row that is sent
    has metric local differential privacy (d_chi-privacy): the privacy loss between two possible
    rows is at most eta times the distance between them. After the noise is added, the row is
    clipped to a norm. With `row_axes=2` in `vfl.split`, each token vector counts as a row, as in
    the paper; otherwise a row is the whole cut of one record. If the same rows are queried again in
    the same step, they get the same noise. Without a U-shape, the feature party receives no cut, so
    the defense consists of the noise alone.

    Source: Mai, Yan, Huang, Yang, Pang 2024, "Split-and-denoise: protect large language model
    inference with local differential privacy" (ICML): the noise mechanism, the clipping after the
    noise, and a denoiser that reads the clean vectors, the noise and the returned vectors. In the
    paper, the server trains the denoiser on public texts, with its own clean outputs as targets,
    and gives it to the users. In vfl, the denoiser trains together with the feature party's last
    layers, on the loss of the task. vfl's denoiser has one attention layer.

    Args:
        eta: epsilon (privacy loss) per unit of distance between two rows.
        norm: largest norm of a row after the noise; the default is too large to clip anything in
            practice.
        hidden: width of the denoiser's attention layer; a multiple of 4.

    >>> SplitAndDenoise(eta=8).restorer(6, 5)(torch.ones(2, 5), torch.ones(2, 6), torch.ones(2, 6))
    tensor([[1., 1., 1., 1., 1.],
            [1., 1., 1., 1., 1.]], grad_fn=<AddBackward0>)

    Raises:
        BadOptionError: an option is out of range.
    """

    side = "feature"
    rows_apart = True
    once = True

    def __init__(self, eta: float = 50.0, norm: float = _MOST_NORM, hidden: int = 64) -> None:
        require_range("eta", eta, _LEAST_ETA, MOST_EPSILON)
        require_range("norm", norm, _LEAST_NORM, _MOST_NORM)
        wanted = f"a multiple of {_HEADS}, at most {_MOST_HIDDEN}"
        require("hidden", hidden, wanted, 0 < hidden <= _MOST_HIDDEN and hidden % _HEADS == 0)
        self.eta = eta
        self.norm = norm
        self.hidden = hidden

    def working_bytes(self, rows: int, columns: int, width: int) -> int:
        return 8 * 8 * rows * width

    def embedding(self, cut: Tensor, context: StepContext) -> Tensor:
        if context.secret is None:
            return self._clipped(cut)
        phase = "train" if context.training else "query"
        stream = (phase, context.step, repr(self.eta), fingerprint(cut))
        noise = torch.from_numpy(_drawn(context.secret, *cut.shape, *stream)) / self.eta
        return self._clipped(cut + noise.to(cut))

    def restorer(self, sent: int, returned: int) -> nn.Module:
        return Denoiser(sent, returned, self.hidden)

    def privacy(self) -> tuple[PrivacyStatement, ...]:
        against = (
            "the label party: metric differential privacy of one message of a row, with epsilon = "
            f"{self.eta:g} x the distance of two rows; epsilons add up over epochs and queries"
        )
        return (PrivacyStatement("inputs", against),)

    def _clipped(self, rows: Tensor) -> Tensor:
        lengths = rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        clipped: Tensor = rows * (self.norm / lengths).clamp(max=1)
        return clipped


def _drawn(secret: Secret, rows: int, width: int, *stream: str | int) -> np.ndarray:
    """Draw noise z with density proportional to exp(-|z|), float64, axes (rows, width).

    The direction of the noise is uniform. The length of the noise has the Gamma distribution of a
    sum of `width` independent exponential random numbers.
    """
    direction = secret.normal((rows, width), "split_and_denoise direction", *stream)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    length = abs(secret.laplace((rows, width), "split_and_denoise length", *stream)).sum(1)
    drawn: np.ndarray = direction * length[:, None]
    return drawn

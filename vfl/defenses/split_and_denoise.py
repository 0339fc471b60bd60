"""Split-N-Denoise: noise on token vectors, and a repair of what a server makes of them."""

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
    """Adds a correction to what came back, computed from it, the clean vectors and their noise.

    A layer of attention lets every returned vector read all tokens of its row.

    Args:
        sent: width of a token vector.
        returned: width of a returned vector.
        hidden: width of the layer; a multiple of 4.
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
        """The repaired vectors, axes of `returned`: (rows, width) or (rows, tokens, width)."""
        tokens = _with_tokens(torch.cat([cut, sent - cut], -1))
        back = _with_tokens(returned)
        read = torch.cat([self.of_returned(back), self.of_tokens(tokens)], 1)
        correction: Tensor = self.last(self.layer(read)[:, : back.shape[1]])
        return returned + correction.reshape(returned.shape)


def _with_tokens(values: Tensor) -> Tensor:
    """Values of axes (rows, tokens, width); a row without tokens is a single one."""
    return (
        values[:, None] if values.dim() == 2 else values.reshape(len(values), -1, values.shape[-1])
    )


class SplitAndDenoise(Defense):
    """Each row of the cut gets noise, and in a U-shape the party repairs what comes back.

    A row z has the density of exp(-eta |z|) around it: that is eta times the distance of two rows
    of metric local differential privacy (d_chi-privacy), for one message of the row. Then it is
    clipped to a norm. With `row_axes=2` in `vfl.split` a row is one token vector, as in the source;
    else it is the whole cut of a row. The same rows asked again in the same step get the same
    noise. Where nothing comes back to the feature party, the noise is all that is left.

    Source: Mai, Yan, Huang, Yang, Pang 2024, "Split-and-denoise: protect large language model
    inference with local differential privacy" (ICML): its mechanism, its clipping after the noise,
    and a denoiser that reads the clean vectors, the noise and what came back. There the server
    trains the denoiser on public texts, to its own clean outputs, and hands it out; here it trains
    with the party's last layers, by the loss of the task. It has one layer of attention.

    Args:
        eta: epsilon for a distance of 1 between two rows.
        norm: bound of a row's norm after the noise; the default clips nothing in practice.
        hidden: width of the denoiser's layer, a multiple of 4.

    >>> SplitAndDenoise(eta=8).restorer(6, 5)(torch.ones(2, 5), torch.ones(2, 6), torch.ones(2, 6))
    tensor([[1., 1., 1., 1., 1.],
            [1., 1., 1., 1., 1.]], grad_fn=<AddBackward0>)

    Raises:
        BadOptionError: an option out of range.
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
            f"the label party: metric differential privacy of one message of a row, {self.eta:g} "
            "times the distance of two rows; it adds up over epochs and queries"
        )
        return (PrivacyStatement("inputs", against),)

    def _clipped(self, rows: Tensor) -> Tensor:
        lengths = rows.norm(dim=1, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
        clipped: Tensor = rows * (self.norm / lengths).clamp(max=1)
        return clipped


def _drawn(secret: Secret, rows: int, width: int, *stream: str | int) -> np.ndarray:
    """Draws of density proportional to exp(-|z|), float64, axes (rows, width).

    The direction is uniform; the length is the sum of as many exponential draws as the width, which
    has the Gamma law.
    """
    direction = secret.normal((rows, width), "split_and_denoise direction", *stream)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    length = abs(secret.laplace((rows, width), "split_and_denoise length", *stream)).sum(1)
    drawn: np.ndarray = direction * length[:, None]
    return drawn

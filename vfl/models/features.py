"""A pretrained model as a bottom: hidden states, pooled or token by token."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vfl.core.errors import DataError, WidthError
from vfl.core.registry import MOST_WEIGHT, require_choice, require_range
from vfl.models.base import Bottom, Shape, picture_axes, sequence_steps, whole_numbers
from vfl.models.decoder import PictureEncoder
from vfl.models.lora import adapt
from vfl.models.pretrained import (
    TOKENIZER,
    Part,
    Pretrained,
    describe,
    existing_model,
    load_pretrained,
)

Pool = Literal["mean", "max", "first", "last", "tokens"]
_POOLS = ("mean", "max", "first", "last", "tokens")
_PARTS = ("body", "text", "vision")
#: Bytes of features that a frozen model keeps, so that an epoch does not compute them again.
MOST_KEPT_BYTES = 1 << 30


class PretrainedBottom(Bottom):
    """Hidden states of a pretrained model behind one of its blocks, then a linear layer.

    A cut as wide as the features has no linear layer.

    Texts are rows of numbers: 0 is padding, n + 1 the tokenizer's token n (`data.tokenizer` makes
    such rows). Pictures are resized to the model's size. A frozen model is no part of the run's
    weights: each party that computes it needs the same model under the same name, and a run keeps
    a digest of it. Features are kept in memory, so each row passes the model once.

    Texts longer than the model's context are read in windows of its length.

    Args:
        name: of a model on this machine (`vfl model list`), never a path.
        layer: number of blocks that compute the features; 0 is the embedding, -1 all blocks and
            the final norm.
        pool: over the tokens of a row: "mean", "max", the "first" or the "last" one, or all
            "tokens" side by side.
        part: "text" or "vision", the tower of a CLIP.
        norm: whether each row's features get mean 0 and deviation 1 (Ba et al. 2016, without
            weights); those of published models differ by orders of magnitude.
        rank: of low-rank adapters that train (Hu et al. 2022); 0 freezes the model.
        alpha: scale of the adapters.

    Raises:
        BadOptionError: an option out of range.
    """

    def __init__(
        self,
        name: str,
        layer: int = -1,
        pool: Pool = "mean",
        part: Part = "body",
        norm: bool = True,
        rank: int = 0,
        alpha: float = 8.0,
    ) -> None:
        require_range("layer", layer, -1, 1024)
        require_choice("pool", pool, _POOLS)
        require_choice("part", part, _PARTS)
        require_range("rank", rank, 0, 4096)
        require_range("alpha", alpha, 0, MOST_WEIGHT)
        self.name, self.layer, self.pool, self.part = name, layer, pool, part
        self.norm, self.rank, self.alpha = norm, rank, alpha

    def build(self, shape: Shape, width: int) -> nn.Module:
        folder = existing_model(self.name)
        found = describe(folder, self.part)
        require_range("layer", self.layer, -1, found.shape.layers)
        on_meta = torch.empty(0).is_meta
        model = found.empty() if on_meta else load_pretrained(folder, self.part)
        if isinstance(model, PictureEncoder):
            picture_axes(shape, "pretrained")
            steps, size = (model.shape.size // model.shape.patch) ** 2 + 1, 0
        else:
            steps = sequence_steps(shape, "pretrained")
            size = model.shape.context
            if steps > size and self.pool not in ("mean", "max"):
                raise WidthError(
                    f"pool '{self.pool}' takes rows of one window",
                    got=f"{steps} tokens a row",
                    want=f"at most {size} tokens, or pool=mean",
                )
        made = model.shape.width * (steps if self.pool == "tokens" else 1)
        shift = int((folder / TOKENIZER).is_file())
        features = Features(
            adapt(model, self.rank, self.alpha) if self.rank else model,  # type: ignore[arg-type]
            layer=None if self.layer < 0 else self.layer,
            pool=self.pool,
            shift=shift,
            frozen=not self.rank,
        )
        norm = nn.LayerNorm(made, elementwise_affine=False) if self.norm else nn.Identity()
        return nn.Sequential(
            features, norm, nn.Identity() if made == width else nn.Linear(made, width)
        )


class _Kept:
    """A frozen model and features of rows it has seen; a copy of a bottom shares both."""

    def __init__(self, model: Pretrained) -> None:
        self.model = model.requires_grad_(requires_grad=False)
        self.features: dict[bytes, Tensor] = {}
        self.bytes = 0
        self.digest = _digest(model)

    def __deepcopy__(self, memo: dict[int, object]) -> _Kept:
        return self

    def add(self, key: bytes, features: Tensor) -> None:
        size = features.numel() * features.element_size()
        if self.bytes + size <= MOST_KEPT_BYTES:
            self.features[key] = features
            self.bytes += size


class Features(nn.Module):
    """What `PretrainedBottom` builds below its linear layer.

    Args:
        model: without its head.
        layer: see `PretrainedBottom`; None is -1 there.
        pool: likewise.
        shift: what is added to a tokenizer's numbers in rows.
        frozen: whether the model is no part of this module's weights.
    """

    def __init__(
        self, model: Pretrained, *, layer: int | None, pool: Pool, shift: int, frozen: bool
    ) -> None:
        super().__init__()
        self._layer, self._pool, self._shift = layer, pool, shift
        self._kept = _Kept(model) if frozen else None
        self.model = None if frozen else model
        weights = sum(each.numel() for each in model.parameters())
        if frozen and next(model.parameters()).is_meta:
            # `footprint` counts what a module holds, and this one holds its model elsewhere.
            self.register_buffer("weights", torch.empty(weights, device="meta"), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Axes (rows, tokens) or (rows, channels, height, width) in, (rows, features) out."""
        if self._kept is None:
            assert self.model is not None, "one of both"
            return self._computed(self.model, rows)
        kept = self._kept
        if rows.is_meta:
            return self._computed(kept.model, rows)
        keys = [hashlib.blake2b(each.numpy().tobytes(), digest_size=16).digest()
                for each in rows.detach().cpu().contiguous()]  # fmt: skip
        new = {key: index for index, key in enumerate(keys) if key not in kept.features}
        computed: dict[bytes, Tensor] = {}
        if new:
            model = kept.model.to(rows.device)
            with torch.no_grad():
                found = self._computed(model, rows[list(new.values())]).cpu()
            computed = dict(zip(new, found.unbind(), strict=True))
            for key, features in computed.items():
                kept.add(key, features.clone())
        made = [computed[key] if key in computed else kept.features[key] for key in keys]
        return torch.stack(made).to(rows.device)

    def get_extra_state(self) -> Tensor:
        """A digest of the frozen model, which is no part of the weights; empty without one."""
        digest = self._kept.digest if self._kept else b""
        return torch.tensor(list(digest), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse weights that were trained beside another model.

        Raises:
            DataError: the frozen model is another one.
        """
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise DataError(
                "the pretrained model on this machine is not the one of this run",
                want="the model that the run was trained with, under the same name",
                fix="vfl model list",
            )

    def _computed(self, model: Pretrained, rows: Tensor) -> Tensor:
        if isinstance(model, PictureEncoder):
            size = model.shape.size
            if rows.shape[-1] != size or rows.shape[-2] != size:
                rows = F.interpolate(rows, (size, size), mode="bilinear", antialias=True)
            hidden = model.hidden(rows, self._layer)
            return self._pooled(hidden, torch.ones(hidden.shape[:2], device=rows.device))
        most = model.shape.vocabulary - 1 + self._shift
        numbers = whole_numbers(rows, most, "pretrained", "tokens")
        real = numbers > 0 if self._shift else torch.ones_like(numbers, dtype=torch.bool)
        tokens = (numbers - self._shift).clamp(min=0)
        window = model.shape.context
        hidden = torch.cat(
            [
                model.hidden(part, self._layer, _some(mask))
                for part, mask in zip(_windows(tokens, window), _windows(real, window), strict=True)
            ],
            1,
        )
        return self._pooled(hidden, real.float())

    def _pooled(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Axes (rows, tokens, width) and (rows, tokens) in, (rows, features) out."""
        if self._pool == "tokens":
            return hidden.flatten(1)
        if self._pool == "first":
            return hidden[:, 0]
        if self._pool == "last":
            last = (real.sum(1).long() - 1).clamp(min=0)
            return hidden[torch.arange(len(hidden), device=hidden.device), last]
        if self._pool == "max":
            empty = real.sum(1) == 0
            best = hidden.masked_fill(real[..., None] == 0, -math.inf).amax(1)
            return best.masked_fill(empty[:, None], 0.0)
        counts = real.sum(1, keepdim=True).clamp(min=1)
        return (hidden * real[..., None]).sum(1) / counts


def _windows(tokens: Tensor, window: int) -> tuple[Tensor, ...]:
    return torch.split(tokens, window, 1)


def _some(real: Tensor) -> Tensor:
    """The mask, with the first token of rows without any: attention over none is no number."""
    if real.is_meta or bool(real.any(1).all()):
        return real
    real = real.clone()
    real[:, 0] |= ~real.any(1)
    return real


def _digest(model: Pretrained) -> bytes:
    found = hashlib.sha256()
    for name, weight in model.state_dict().items():
        found.update(name.encode())
        if not weight.is_meta:
            found.update(weight.contiguous().numpy().tobytes())
    return found.digest()

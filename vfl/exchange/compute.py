"""Where a party's own models run, and in which precision; what crosses is float32 on the CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from vfl.errors import UserError


class Compute:
    """A party's device; no other party knows it or needs to.

    Args:
        device: "cpu", "cuda", "cuda:1", as torch names it.
        precision: "float32", or "bfloat16" for automatic mixed precision in the forward passes;
            weights, cuts and gradients stay float32.

    Raises:
        UserError: torch cannot use that device here.
    """

    def __init__(self, device: str = "cpu", precision: str = "float32") -> None:
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as problem:
            raise UserError(
                f"torch cannot use the device '{device}' here",
                got=str(problem).splitlines()[0],
                want="cpu, or cuda with a graphics card and a torch built for it",
            ) from None
        self._mixed = precision == "bfloat16"

    def forward(self) -> AbstractContextManager[None]:
        """What a model's forward pass runs under."""
        if not self._mixed:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

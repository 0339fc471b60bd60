"""Devices, compiled models and optimisers: the one place that touches what torch keeps private.

What torch may change without notice is used where it gains enough, and has a public way beside it,
taken where torch has the private one no more; where none does the same, it says so. Gains are CPU
time of an exchange in one process: two feature parties with a hidden layer of 16 units, 32 rows.
"""

from __future__ import annotations

import atexit
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from itertools import chain
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn, optim

# What sees every operation of a model, and finds the tensors in it; torch has no public names.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

from vfl.core.errors import UserError

_COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"

#: The `__torch_function__` of a subclass of tensors whose results are plain tensors. There is no
#: public one: what torch gives otherwise is of the subclass again.
PLAIN_RESULTS: Any = torch._C._disabled_torch_function_impl

OptimizerFactory = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


class Compute:
    """A party's device; no other party knows it or needs to.

    Args:
        device: "cpu", "cuda", "cuda:1", as torch names it.
        precision: "float32", or "bfloat16" for automatic mixed precision in the forward passes;
            weights, cuts and gradients stay float32. On a card float32 convolutions are exact,
            where torch would round what they multiply to 10 bits (TF32).
        compiled: whether models run as `torch.compile` makes them; dropout draws the same.

    Raises:
        UserError: torch cannot use that device here, or cannot compile for it.
    """

    def __init__(
        self, device: str = "cpu", precision: str = "float32", compiled: bool = False
    ) -> None:
        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
            if self.device.type == "cuda":
                torch.backends.cudnn.allow_tf32 = False
        except (RuntimeError, AssertionError) as problem:
            raise UserError(
                f"torch cannot use the device '{device}' here",
                got=str(problem).splitlines()[0],
                want="cpu, or cuda with a graphics card and a torch built for it",
            ) from None
        self._mixed = precision == "bfloat16"
        self._compiled = compiled
        self._compiled_parts: dict[str, Callable[[Tensor], Tensor]] = {}
        if compiled and self.device.type == "cpu" and shutil.which("g++") is None:
            raise UserError(
                "torch compiles models for the processor with a C++ compiler, and none is here",
                where="train.compile",
                want="g++ in the path of this party",
                fix="install it, or leave train.compile = false",
            )

    def take(self, model: nn.ModuleDict) -> None:
        """Bring a party's model here; names and values of its weights stay."""
        model.to(self.device)
        if not self._compiled:
            return
        # torch's own folder for this has a name that anybody on the machine could be first to use.
        if _COMPILED_CODE not in os.environ:
            folder = TemporaryDirectory(prefix="vfl-compiled-")
            os.environ[_COMPILED_CODE] = folder.name
            atexit.register(folder.cleanup)
        # torch's compiler looks at every input so, a merged cut among them.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        options: dict[str, str | int | bool | Callable[..., Any]] = {
            "fallback_random": True,
            "fx_graph_cache": False,
        }
        self._compiled_parts = {
            part: torch.compile(model[part], options=options)
            for part in ("bottom", "top")
            if part in model
        }

    def run(self, model: nn.ModuleDict, part: str, values: Tensor) -> Tensor:
        """What one part of a model that was taken makes of `values`."""
        outputs: Tensor = self._compiled_parts.get(part, model[part])(values)
        return outputs

    def forward(self) -> AbstractContextManager[None]:
        """What a model's forward pass runs under."""
        if not self._mixed:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)


try:
    from torch.optim.optimizer import _global_optimizer_post_hooks as _after_all
    from torch.optim.optimizer import _global_optimizer_pre_hooks as _before_all
except ImportError:
    _KNOWN_HOOKS = False
else:
    _KNOWN_HOOKS = True


def unhooked(kind: type[optim.Optimizer]) -> type[optim.Optimizer]:
    """An optimiser of torch without the hooks of torch.compile, whose import takes a second of CPU.

    Its methods are torch's own, as they stand behind those hooks, and a step is no range of torch's
    profiler: 7 % of a step. What was registered to run before and after a step does.

    Returns:
        The class itself where it is not torch's, or torch has other insides.
    """
    if not _KNOWN_HOOKS or not kind.__module__.startswith("torch.optim."):
        return kind
    hooked = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    plain = {name: inspect.unwrap(getattr(kind, name)) for name in hooked}
    own_step = torch.no_grad()(inspect.unwrap(kind.step))

    def step(optimizer: optim.Optimizer) -> None:
        for before in chain(_before_all.values(), optimizer._optimizer_step_pre_hooks.values()):
            before(optimizer, (), {})
        own_step(optimizer)
        for after in chain(optimizer._optimizer_step_post_hooks.values(), _after_all.values()):
            after(optimizer, (), {})

    step.hooked = True  # type: ignore[attr-defined]  # so torch leaves it as it is
    return type(kind.__name__, (kind,), plain | {"step": step})


#: Runs backward passes; None where torch has it under another name.
_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)


def go_back(roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """`torch.autograd.backward`, which imports torch's symbolic shapes to compare two sizes.

    They take a second of CPU once, and the comparison 5 % of a step. The engine
    refuses sizes that differ by itself.
    """
    if _ENGINE is None:
        torch.autograd.backward(roots, grads)
        return
    flags = {"allow_unreachable": True, "accumulate_grad": True}
    _ENGINE.run_backward(tuple(roots), tuple(grads), False, False, (), **flags)


def gloo_at(host: str, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """A group of gloo among processes of one machine, which listens at this address alone.

    The public way is no fallback: it listens where the machine's name leads, and gloo, which does
    not encrypt, lets everybody in who reaches its port.
    """
    from torch import distributed

    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)

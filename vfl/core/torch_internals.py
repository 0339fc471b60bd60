"""Devices, compiled models and optimisers, with the private parts of torch that save much time.

Private parts of torch may change without notice. If a torch version lacks a private part, the
module uses a public alternative; where there is no alternative, a comment says so. The savings of
CPU time in the comments are fractions of one training step of a process with two feature parties, a
hidden layer of 16 units, and 32 rows.
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

# Classes and functions that observe every operation of a model and find its tensors; torch has no
# public names for them.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves

from vfl.core.errors import UserError

_COMPILED_CODE = "TORCHINDUCTOR_CACHE_DIR"

#: Method `__torch_function__` for a tensor subclass; with it, operations return plain tensors.
#: Torch has no public function for this purpose: by default, operations on the subclass return
#: objects of the subclass.
PLAIN_RESULTS: Any = torch._C._disabled_torch_function_impl

OptimizerFactory = Callable[[Iterable[nn.Parameter]], optim.Optimizer]


def before_steps(
    build: OptimizerFactory, act: Callable[[list[nn.Parameter]], None]
) -> OptimizerFactory:
    """Return an optimiser factory; before every step, its optimisers call `act` with their weights.

    >>> build = before_steps(lambda weights: optim.SGD(weights, 0.1), lambda weights: print("step"))
    >>> build([nn.Parameter(torch.zeros(1))]).step()
    step
    """

    def built(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        weights = list(parameters)
        optimizer = build(weights)
        optimizer.register_step_pre_hook(lambda *_: act(weights))
        return optimizer

    return built


class Compute:
    """The device and precision of a party's computations; other parties do not receive them.

    Args:
        device: "cpu", "cuda", "cuda:1" or another device name of torch.
        precision: "float32", or "bfloat16" for automatic mixed precision in the forward passes;
            weights, cut-layer activations and gradients stay float32. On a GPU, float32
            convolutions are computed in float32; by default, torch would round their factors to 10
            bits (TF32).
        compiled: whether models run under `torch.compile`; the random draws of dropout stay the
            same.

    Raises:
        UserError: torch cannot use that device here, or cannot compile models for it.
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
                "torch needs a C++ compiler to compile models for the processor, and none "
                "is installed",
                where="train.compile",
                want="g++ on the PATH of this party",
                fix="install it, or leave train.compile = false",
            )

    def take(self, model: nn.ModuleDict) -> None:
        """Move a party's model to the device, and compile its bottom and top model if requested."""
        model.to(self.device)
        if not self._compiled:
            return
        # The name of torch's own cache folder is predictable, so another user of the machine could
        # create that folder first.
        if _COMPILED_CODE not in os.environ:
            folder = TemporaryDirectory(prefix="vfl-compiled-")
            os.environ[_COMPILED_CODE] = folder.name
            atexit.register(folder.cleanup)
        # torch's compiler reads `.grad` of every input, also of merged cut-layer activations; this
        # causes the warning.
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
        """Run a party's bottom or top model on `values`; call `take` before the first call."""
        outputs: Tensor = self._compiled_parts.get(part, model[part])(values)
        return outputs

    def forward(self) -> AbstractContextManager[None]:
        """Return the context in which a model's forward pass runs; it sets the precision."""
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
    """Return an optimiser class without torch.compile's hooks, whose import takes 1 s of CPU time.

    The methods of the class are torch's own methods, without the wrappers that contain these hooks.
    An optimiser step opens no record of torch's profiler, which saves 7 % of a training step's CPU
    time. Hooks that users register before or after a step still run.

    Returns:
        The given class itself, if it is not one of torch's classes or if torch's internals differ.
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


#: Engine that runs backward passes; None if torch has no engine under this name.
_ENGINE = getattr(torch.autograd.Variable, "_execution_engine", None)


def go_back(roots: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Run `torch.autograd.backward` without its import of torch's symbolic shapes.

    The import takes a second of CPU time once, and the comparison of tensor sizes takes 5 % of each
    training step. The autograd engine itself refuses gradients of a wrong size.
    """
    if _ENGINE is None:
        torch.autograd.backward(roots, grads)
        return
    flags = {"allow_unreachable": True, "accumulate_grad": True}
    _ENGINE.run_backward(tuple(roots), tuple(grads), False, False, (), **flags)


def gloo_at(host: str, store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Make a gloo process group on one machine; gloo then listens only at the address `host`.

    The public alternative is no fallback: it listens at the address of the machine's host name, and
    gloo, which does not encrypt, accepts any process that reaches its port.
    """
    from torch import distributed

    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    return gloo(store, rank, size, options)

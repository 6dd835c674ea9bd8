"""Find what one step keeps in memory: activations by module, the optimizer's state, sparse gradients.

Autograd says what it keeps while the model's forward runs (`saved_tensors_hooks`); each storage counts once, for the
module with parameters that was reached last. Parameters, buffers and the batch are not activations. What a loss outside
of the model keeps is not seen. Only one step is looked at, which the profile's warm-up leaves out.
"""

from contextlib import ExitStack
from typing import Any

import torch

from offbeat.graph.capture import optimizer_state
from offbeat.torch_private import pytree, storage_of, stored_rows


class Footprint:
    """Looks at the first forward and the first update that it is told of."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.calls: list[list[int]] = []
        """[bytes that the module is given, bytes that autograd keeps for it] of each call."""
        self.inputs = 0
        self.looking = ExitStack()
        self.forward_seen = False
        self.counted: set[int] = set()
        self.found: dict[str, Any] | None = None

    def forward_begins(self, *given: Any) -> None:
        """The model's forward begins, with its arguments if they are known."""
        if self.forward_seen or not torch.is_grad_enabled():
            return
        self.forward_seen = True
        batch = [tensor for tensor in pytree.tree_leaves(given) if isinstance(tensor, torch.Tensor)]
        standing = (*self.model.parameters(), *self.model.buffers(), *batch)
        self.counted = {storage_of(tensor) for tensor in standing if tensor.layout == torch.strided}
        self.inputs = sum(tensor.nbytes for tensor in batch)
        self.looking.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor))

    def reached(self, given: Any) -> None:
        """A module with parameters of its own is called."""
        if self.forward_seen and self.found is None:
            given = [tensor.nbytes for tensor in pytree.tree_leaves(given) if isinstance(tensor, torch.Tensor)]
            self.calls.append([sum(given), 0])

    def forward_ends(self) -> None:
        self.looking.close()
        if self.forward_seen and self.found is None:
            self.found = {"calls": self.calls, "inputs": self.inputs}

    def updated(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """What was seen, at the first update after the forward; None at others."""
        if self.found is None or "optimizer" in self.found:
            return None
        name, slots = optimizer_state(optimizer)
        gradients = ((name, parameter.grad) for name, parameter in self.model.named_parameters())
        sparse = [(name, stored_rows(grad)) for name, grad in gradients if grad is not None and grad.is_sparse]
        buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        self.found |= {"optimizer": name, "slots": slots, "sparse": sparse, "buffers": buffers}
        return self.found

    def _saved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.calls and tensor.layout == torch.strided and (key := storage_of(tensor)) not in self.counted:
            self.counted.add(key)
            self.calls[-1][1] += tensor.untyped_storage().nbytes()
        return tensor

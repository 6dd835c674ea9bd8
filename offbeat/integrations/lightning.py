"""Lightning's Trainer on Offbeat's engine instead of DDP.

    trainer = lightning.Trainer(strategy=OffbeatStrategy("overlap"), devices=4)

Lightning runs the whole of `training_step` in place of the model's forward and may call the model inside. So what is
distributed is a shell around the LightningModule that shares its parameters, buffers and submodules under their own
names; only the shell's forward is a step's.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.api import Wanted, distribute
from offbeat.errors import OffbeatError
from offbeat.integrations import missing
from offbeat.torch_private import share_registries

try:
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    raise missing("lightning", "lightning") from None


class OffbeatStrategy(DDPStrategy):
    """A Lightning strategy: launching, samplers and reductions of metrics as with "ddp", training on Offbeat's engine.

    `strategy` is what `offbeat.distribute` takes and `distribute_options` are its other keywords; `options` go to
    Lightning's DDPStrategy (timeout, process_group_backend, start_method).
    """

    model: Any
    optimizers: list[Any]

    def __init__(
        self, strategy: Wanted = "auto", *, distribute_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._wanted = strategy
        self._distribute_options = distribute_options or {}
        self._runtime: Any = None
        self._handles: list[Any] = []
        self._failed = False

    def configure_ddp(self) -> None:
        """Wraps the model in the shell, without an engine until there is an optimizer."""
        self.model = _Shell(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise OffbeatError(f"configure_optimizers: Offbeat trains with one optimizer, not {len(self.optimizers)}")
        distribute(self.model, self.optimizers[0], self._wanted, **self._distribute_options)
        self._runtime = self.model._offbeat
        # Lightning keeps a wrapper of each optimizer's class, which has changed.
        self.optimizers = list(self.optimizers)
        module, runtime = self.lightning_module, self._runtime
        self._handles = [
            module.register_state_dict_pre_hook(lambda *_: runtime.engine.settle_all()),
            module.register_load_state_dict_pre_hook(lambda *_: runtime.engine.settle_all()),
            module.register_load_state_dict_post_hook(lambda *_: runtime.engine.take_values()),
        ]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Runs forward and backward first, then a step() that need not wait for them."""
        scaled = getattr(self.precision_plugin, "scaler", None) is not None
        if scaled or isinstance(optimizer, torch.optim.LBFGS):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = self.precision_plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Torch puts the state where the parameters are; ranks that hold parts of it have nothing to move."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Accumulated gradients stay local until the last of them."""
        return self.model.no_sync()

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Makes module and optimizer plain again, with the newest values."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            if self._failed:
                # Other ranks may be gone; those that wait for this one learn of it.
                runtime.engine.channels.close()
            else:
                runtime.release()
            for handle in self._handles:
                handle.remove()
            self.model = self.lightning_module
        super().teardown()


class _Shell(torch.nn.Module):
    """Has everything of a LightningModule but its hooks and methods."""

    inner: torch.nn.Module

    def __init__(self, inner: torch.nn.Module) -> None:
        self.__dict__["inner"] = inner
        super().__init__()
        share_registries(self, inner)

    @property
    def training(self) -> bool:
        return self.inner.training

    @training.setter
    def training(self, value: bool) -> None:
        """Lightning sets the module's own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)

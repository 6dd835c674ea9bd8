"""Hugging Face's Trainer on Offbeat's engine instead of DDP.

    trainer = OffbeatTrainer(model=model, args=args, train_dataset=data, strategy="overlap")

Other trainers take `OffbeatMixin` as their first base class. The Trainer reads every step's gradients to log their
norm, so `step()` waits for all of them; with `max_grad_norm=0` Offbeat leaves the norm out, and each module's next
forward waits for its own variables only.
"""

from typing import Any

import torch

from offbeat.api import Wanted
from offbeat.integrations import missing
from offbeat.integrations.accelerate import adopt

try:
    import accelerate  # noqa: F401 - transformers' Trainer cannot be used without it
    from transformers import Trainer
except ImportError:
    raise missing("transformers with accelerate", "transformers") from None


class OffbeatMixin:
    """For subclasses of transformers.Trainer: `strategy` is what `offbeat.distribute` takes, `distribute_options` its
    other keywords."""

    model: torch.nn.Module
    optimizer: Any
    accelerator: Any
    args: Any

    def __init__(
        self, *args: Any, strategy: Wanted = "auto", distribute_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._offbeat_strategy = strategy
        self._offbeat_options = distribute_options or {}
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Creates the Trainer's optimizer and distributes model and optimizer."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if self.accelerator.num_processes > 1 and not self._distributed:
            adopt(self.accelerator, self.model, optimizer, self._offbeat_strategy, **self._offbeat_options)
        return optimizer

    @property
    def _distributed(self) -> bool:
        return hasattr(self.model, "_offbeat")

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        if self._distributed and grad_norm is None and not self.args.max_grad_norm:
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._distributed and not self.args.should_save:
            # State that is spread over ranks is put together by all of them; the Trainer asks only those that save.
            self.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


class OffbeatTrainer(OffbeatMixin, Trainer):
    """transformers.Trainer on Offbeat's engine."""

"""The process groups on which split operators exchange parts, kept for the next distribute() of the same job.

Each runs one collective after another. A group of gloo that torch opens has two threads, and both write the name of the
collective that has ended into one string without a lock (`ProcessGroupGloo::runLoop`, torch 2.13). Where a name is
longer than 15 letters, as that of the functional all-gather is, two collectives that end at once free the same memory
twice.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from offbeat.runtime.comm import TorchWorld
from offbeat.runtime.comm.connections import shut_down
from offbeat.runtime.comm.torch_channel import StreamWork, TorchChannel
from offbeat.runtime.lifetime import close_at_exit, script_failed
from offbeat.timeline.clock import DeviceMoment
from offbeat.torch_private import named_group, outside_tracing


class Groups:
    """Groups of ranks by job, device and members."""

    def __init__(self) -> None:
        self.opened: dict[tuple[Any, str, tuple[int, ...]], tuple[TorchChannel, str, Any]] = {}
        """The channel of each group, its name, and what keeps the name."""
        self.broken = False
        """Whether a step has failed, which may have left collectives in flight."""

    def name(self, world: TorchWorld, members: tuple[int, ...], timeout: timedelta) -> str:
        """The name by which functional collectives find the group; all members ask for it in turn."""
        key = (dist.group.WORLD, world.backend, members)
        if key not in self.opened:
            if not self.opened:
                close_at_exit(self)
            name = f"offbeat/split/{world.next_generation()}/{'.'.join(map(str, members))}"
            with outside_tracing():
                channel = world.open_channel(name, members, in_flight=1, timeout=timeout)
                self.opened[key] = channel, name, named_group(channel.group, name, world.store, world.device)
        return self.opened[key][1]

    def close(self, deadline: float) -> None:
        """Closes all groups, and breaks off what a failed step has left in flight: the end would wait for it."""
        failed = self.broken or script_failed()
        left = list(self.opened.values())
        if not failed or any(channel.stream is not None for channel, *_ in left):
            self.opened.clear()
        while left:
            channel, _, named = left.pop()
            del named
            if channel.stream is not None:
                if failed:
                    channel.group.abort()
                # What forward and backward have started they wait for on the current stream.
                StreamWork(channel, DeviceMoment(), ())
                channel.close(deadline)
            elif failed:
                # What still refers to the group keeps its threads from being waited for.
                shut_down(channel.connections)
            else:
                channel.close(deadline)


groups = Groups()
"""Of this process: models that used them may be gone when it ends."""

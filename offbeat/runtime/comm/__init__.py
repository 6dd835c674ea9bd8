"""Communication between ranks: one protocol (`protocol`), on torch's process groups."""

from offbeat.runtime.comm.channels import Channels, Key
from offbeat.runtime.comm.protocol import Channel, CommunicationFailed, Work, World, gather_blocks
from offbeat.runtime.comm.torch_channel import goes_straight, known_costs
from offbeat.runtime.comm.torch_world import TorchWorld, torch_world

__all__ = [
    "Channel",
    "Channels",
    "CommunicationFailed",
    "Key",
    "TorchWorld",
    "Work",
    "World",
    "gather_blocks",
    "goes_straight",
    "known_costs",
    "torch_world",
]

"""One member of a weight transfer's group, as a server's worker is: HOST PORT RANK WORLD_SIZE."""

import sys

import torch

from libra.transfer.group import Place, Signals, connect_store, join, own_address

host, port, rank, world_size = sys.argv[1], *map(int, sys.argv[2:])
own = own_address(host, port)
signals = Signals(connect_store(host, port), "g")
place = Place(rank, world_size, torch.device("cpu"), own)
group = join(signals, place, timeout_s=60.0, stall_s=30.0, beat=lambda: None)
received = torch.zeros(5)
group.wait(group.broadcast(received), stall_s=30.0, beat=lambda: None)
signals.say(f"got/{rank}", f"{own} {received.sum().item():g}")

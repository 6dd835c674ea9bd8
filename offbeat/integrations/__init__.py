"""Other training frameworks → Offbeat's runtime, or Offbeat's choices, inside their loops.

`accelerate`, `huggingface`, `lightning`: the framework's own loop trains on Offbeat's engine. `ddp`: torch's
DistributedDataParallel stays and takes over a strategy's buckets and encoders. Offbeat itself needs none of the
packages; importing a module whose package is missing says which extra installs it.
"""

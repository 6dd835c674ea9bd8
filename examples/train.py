"""A small language model on random tokens: an ordinary DDP job, or with `--offbeat` the same job under Offbeat."""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, LENGTH, BATCH = 500, 256, 32, 16


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.words = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.words(self.layers(self.embedding(tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--offbeat", action="store_true", help="distribute with Offbeat instead of DDP")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.offbeat:
        import offbeat

        model, optimizer = offbeat.distribute(model, optimizer, strategy="auto")
    else:
        model = DistributedDataParallel(model)

    torch.manual_seed(1 + dist.get_rank())
    seconds, losses = [], []
    for _ in range(options.steps):
        begin = time.perf_counter()
        tokens = torch.randint(WORDS, (BATCH, LENGTH + 1))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    if dist.get_rank() == 0:
        late = seconds[options.steps // 2 :]
        print(f"{1e3 * statistics.median(late):.1f} ms a step, first loss {losses[0]:.4f}, last loss {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A tiny Transformer, trained on one long text that is split over processes.

    python examples/long_sequence/train.py
    python examples/long_sequence/train.py --processes 4 --tokens 4096 --steps 20

Each process holds a part of the text. Attention sees all of it: causal, within documents. The split is
plan_sharding's, so that all processes have as much work. On a machine with GPUs, --device cuda takes NCCL and one GPU
for each process. The loss is that of one process (--processes 1).
"""

import argparse
import os
import sys
import tempfile

import anyflash as af
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from anyflash.torch.distributed import attention, plan_sharding

WIDTH, HEADS, LAYERS = 64, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, rule, sharding):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = attention(q, k, v, rule=rule, sharding=sharding)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Bytes in, scores of the next byte out: (1, own tokens) -> (1, own tokens, 256)."""

    def __init__(self):
        super().__init__()
        self.bytes, self.place = nn.Embedding(256, WIDTH), nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x, positions, rule, sharding):
        angles = positions[:, None] / 2.0 ** torch.arange(1, 9, device=x.device)
        x = self.bytes(x) + self.place(torch.cat([angles.sin(), angles.cos()], -1))
        for block in self.blocks:
            x = block(x, rule, sharding)
        return self.scores(self.norm(x))


def text_of(tokens):
    """Documents of 100 to 400 bytes, each with its own few words."""
    chosen = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=chosen))
    text, ends = [], [0]
    while len(text) < tokens:
        words = [[draw(97, 123) for _ in range(draw(2, 6))] + [32] for _ in range(3)]
        length = min(draw(100, 400), tokens - len(text))
        document = sum((words[draw(0, 3)] for _ in range(length)), [])[:length]
        text += document
        ends.append(len(text))
    return torch.tensor(text), torch.tensor(ends, dtype=torch.int32)


def train(rank, options, store):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=options.processes
    )
    text, ends = text_of(options.tokens)
    rule = af.documents_packed(ends) & af.causal()
    sharding = plan_sharding(rule, options.tokens)
    own = sharding.shard(text, dim=0).to(device)[None]
    following = sharding.shard(text.roll(-1), dim=0).to(device)
    positions = sharding.positions().to(device)
    torch.manual_seed(0)  # the same weights in each process
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    if rank == 0:
        moved = sharding.traffic(channels=2 * WIDTH, bytes_of_number=4)
        print(f"{options.tokens} tokens, {len(ends) - 1} documents, {options.processes} processes")
        print(
            f"work of the busiest over the mean {sharding.imbalance:.3f}, exchanged {sum(moved['bytes'])} bytes a layer"
        )
    for step in range(1, options.steps + 1):
        scores = model(own, positions, rule, sharding)[0]
        loss = F.cross_entropy(scores, following, reduction="sum") / options.tokens
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():  # each process has the gradient of its tokens
            dist.all_reduce(weight.grad)
        dist.all_reduce(total := loss.detach().clone())
        optimizer.step()
        if rank == 0 and step % max(1, options.steps // 5) == 0:
            print(f"step {step:4}  loss {float(total):.4f}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="how many share the text (default: 2)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the text (default: 2048)")
    parser.add_argument("--steps", type=int, default=30, help="how long to train (default: 30)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if min(options.processes, options.tokens, options.steps) < 1:
        parser.error("--processes, --tokens and --steps must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (options, f"{folder}/store"), options.processes)


if __name__ == "__main__":
    main()

"""A small Transformer language model, trained from scratch on texts (this project's documents), in plain PyTorch.

    python examples/language_model/train.py

Its attention is torch.nn.functional.scaled_dot_product_attention; one line, `import anyflash.torch.auto`, puts
anyflash in its place. Prints the loss as it falls, then what the model writes. --pytorch leaves that line out, to
compare.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

PROJECT = Path(__file__).resolve().parents[2]
WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 96, 4, 2, 128, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class LanguageModel(nn.Module):
    """Bytes in, scores of the next byte out: (batch, length) -> (batch, length, 256)."""

    def __init__(self):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.scores = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x):
        x = self.bytes(x) + self.places(torch.arange(x.shape[1]))
        return self.scores(self.norm(self.blocks(x)))


def train(model, text, steps):
    """Prints and returns the losses, one of each tenth of the steps (their mean)."""
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20, 1.1 - step / steps))
    losses, part, start = [], [], time.perf_counter()
    for step in range(1, steps + 1):
        places = torch.randint(len(text) - CONTEXT, (BATCH, 1)) + torch.arange(CONTEXT + 1)
        lines = text[places]
        loss = F.cross_entropy(model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        part.append(float(loss.detach()))
        if step % max(1, steps // 10) == 0:
            losses.append(sum(part) / len(part))
            part = []
            speed = (time.perf_counter() - start) / step
            print(f"step {step:4}  loss {losses[-1]:.3f}  {1000 * speed:.0f} ms a step", flush=True)
    return losses


@torch.no_grad()
def sample(model, start, count):
    """`count` more bytes behind those of `start`, drawn by their probabilities, a little sharpened."""
    text = torch.tensor([list(start)])
    for _ in range(count):
        scores = model(text[:, -CONTEXT:])[:, -1]
        text = torch.cat([text, torch.multinomial((scores / 0.7).softmax(-1), 1)], 1)
    return bytes(text[0].tolist()).decode("utf-8", "replace")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="how long to train (default: 300)")
    parser.add_argument("--pytorch", action="store_true", help="with PyTorch's own attention")
    parser.add_argument(
        "files", nargs="*", type=Path, help="texts to learn (default: README.md, docs/*.md, docs/guide/*.md)"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: {arguments.steps}, expected at least 1")
    docs = PROJECT / "docs"
    files = arguments.files or [PROJECT / "README.md", *sorted(docs.glob("*.md")), *sorted(docs.glob("guide/*.md"))]
    try:
        text = torch.tensor(list(b"\n".join(file.read_bytes() for file in files)))
    except OSError as error:
        parser.error(f"files: {error.filename}: {error.strerror}")
    if len(text) <= CONTEXT:
        parser.error(f"files: {len(text)} bytes, expected more than {CONTEXT}")

    if not arguments.pytorch:
        import anyflash.torch.auto  # noqa: F401

    torch.manual_seed(0)
    model = LanguageModel()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(text):,} bytes of text")
    train(model, text, arguments.steps)
    print(sample(model, b"Attention ", 300))


if __name__ == "__main__":
    main()

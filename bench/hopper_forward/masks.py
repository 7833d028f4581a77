"""Masks for run.py, and their runs and words for blocks of 64, made pair by pair: independent of the library's."""

import functools
import math


class Grid:
    """A sequence of up to three dimensions, cut into boxes of 64: an extent and a step in each dimension."""

    def __init__(self, size, extent=(64,), step=(1,)):
        self.size, self.extent, self.step = ((1,) * (3 - len(x)) + tuple(x) for x in (size, extent, step))

    def numbers(self):
        return (*self.size, *self.extent, *self.step)

    def entries(self):
        """(blocks, 64): where in the flat sequence each entry of a block is, -1 where it does not exist."""
        import torch

        coordinates = []
        for size, extent, step in zip(self.size, self.extent, self.step):
            per_step = -(-size // step)
            chunks = -(-per_step // extent)
            residue, chunk, e = torch.meshgrid(*map(torch.arange, (step, chunks, extent)), indexing="ij")
            at = residue + (chunk * extent + e) * step
            coordinates.append(at.masked_fill(at >= size, -1).reshape(step * chunks, extent))
        z, y, x = coordinates
        z, y, x = z[:, None, None, :, None, None], y[None, :, None, None, :, None], x[None, None, :, None, None, :]
        flat = (z * self.size[1] + y) * self.size[2] + x
        return flat.masked_fill((z < 0) | (y < 0) | (x < 0), -1).reshape(-1, 64).cuda()


class Mask:
    """diagonal: query i sees keys 0 .. i + diagonal; None: all. Or dense, (queries, keys), where it is True."""

    def __init__(self, queries, keys, diagonal=None, dense=None, name="", query_grid=None, key_grid=None):
        self.queries, self.keys, self.diagonal, self.given = queries, keys, diagonal, dense
        self.query_grid, self.key_grid = query_grid or Grid((queries,)), key_grid or Grid((keys,))
        self.name = f"{name or 'plain'} {queries} x {keys} diagonal {diagonal}"

    def is_plain(self):
        return self.given is None

    def dense(self):
        import torch

        if self.given is not None:
            return self.given
        i, j = torch.arange(self.queries, device="cuda")[:, None], torch.arange(self.keys, device="cuda")
        return j <= (i + self.diagonal if self.diagonal is not None else i + self.keys)

    def pairs(self):
        """That are seen; of causal masks half of all, as is usual."""
        if self.given is not None:
            return self.given.sum().item()
        return self.queries * self.keys * (1 if self.diagonal is None else 0.5)

    @functools.cached_property
    def groups(self):
        """A DeviceGroup in device memory."""
        import torch

        at_q, at_k = self.query_grid.entries(), self.key_grid.entries()
        dense, starts, runs, words = self.dense(), [0], [], []
        bits = 1 << torch.arange(64, device="cuda")
        for block in at_q:
            exists = (block >= 0)[:, None, None]
            tiles = dense[block.clamp_min(0)][:, at_k.clamp_min(0)] & exists & (at_k >= 0)
            seen = tiles.sum((0, 2))
            whole = (tiles | ~exists).all(2).all(0)  # in a forward plan rows of padding do not count
            partial = ((seen > 0) & ~whole).nonzero()[:, 0]
            number = {k: len(words) + i for i, k in enumerate(partial.tolist())}
            words.extend((tiles[:, partial] * bits).sum(2).T)
            for k, (count, full) in enumerate(zip(seen.tolist(), whole.tolist())):
                if count and full and len(runs) > starts[-1] and runs[-1][2] == 2 and sum(runs[-1][:2]) == k:
                    runs[-1][1] += 1
                elif count:
                    runs.append([k, 1, 2, 0] if full else [k, 1, 1, number[k]])
            starts.append(len(runs))
        nothing = torch.zeros(64, dtype=torch.int64, device="cuda")
        self.kept = [
            torch.tensor(starts, device="cuda"),
            torch.tensor(runs or [[0] * 4], dtype=torch.int32, device="cuda"),
            torch.stack(words).contiguous() if words else nothing,
        ]
        return torch.tensor([0, *(t.data_ptr() for t in self.kept), 0, 0, 0], device="cuda")


def places(queries, keys):
    import torch

    return torch.arange(queries, device="cuda")[:, None], torch.arange(keys, device="cuda")


def document_ids(n, count, generator):
    import torch

    cuts = torch.randint(0, n + 1, (count - 1,), generator=generator, device="cuda")
    return (torch.arange(n, device="cuda")[:, None] >= cuts).sum(1)


def random_masks(queries, keys, generator):
    """Causal, a window, documents, a bitmap of blocks, random pairs of which whole rows and columns are hidden."""
    import torch

    def uniform(*shape):
        return torch.rand(shape, generator=generator, device="cuda")

    i, j = places(queries, keys)
    width, shift = (int(x) for x in (uniform(2) * torch.tensor([300.0, 200.0], device="cuda") + 1).tolist())
    blocks = uniform(queries // 64 + 1, keys // 64 + 1) < 0.4
    made = {
        "causal": j <= i,
        "window": (j - i + shift).abs() < width,
        "documents": document_ids(queries, 4, generator)[:, None] == document_ids(keys, 4, generator),
        "bitmap": blocks[i // 64, j // 64],
        "random": (uniform(queries, keys) < 0.5) & (uniform(queries, 1) < 0.8) & (uniform(1, keys) < 0.3),
    }
    return [Mask(queries, keys, dense=dense, name=name) for name, dense in made.items()]


def box_window(size, extent, step, near, name):
    """Queries and keys on a grid of pixels or tokens. near(distance of each dimension, ...): is it seen?"""
    import torch

    n = math.prod(size)
    at = torch.meshgrid(*(torch.arange(x, device="cuda") for x in size), indexing="ij")
    distances = [x.reshape(-1, 1) - x.reshape(1, -1) for x in at]
    grid = Grid(size, extent, step)
    return Mask(n, n, dense=near(*distances), name=name, query_grid=grid, key_grid=grid)


def random_boxes(generator):
    return [
        box_window((37, 45), (8, 8), (1, 1), lambda y, x: (y.abs() < 5) & (x.abs() < 6), "2-D local"),
        box_window(
            (5, 19, 22),
            (4, 4, 4),
            (1, 1, 1),
            lambda z, y, x: (z.abs() < 2) & (y.abs() < 4) & (x.abs() < 9),
            "3-D local",
        ),
        box_window((1024,), (64,), (4,), lambda x: (x % 4 == 0) & (x.abs() < 120), "strided"),
    ]


def patterns(n):
    """The masks to time, by name, of n tokens; one is made when it is called."""
    import torch

    side = math.isqrt(n)
    generator = torch.Generator("cuda").manual_seed(1)

    def over(name, sees):
        return lambda: Mask(n, n, dense=sees(*places(n, n)), name=name)

    made = {f"window {w}": over("window", lambda i, j, w=w: (j <= i) & (i - j < w)) for w in (256, 1024, 4096)}
    ids = document_ids(n, 12, generator)
    bitmap = torch.rand((n // 128, n // 128), generator=generator, device="cuda") < 0.25
    made["12 documents"] = over("documents", lambda i, j: ids[:, None] == ids)
    made["prefix 4096"] = over("prefix", lambda i, j: (j <= i) | (j < 4096))
    made["bitmap 25 %"] = over("bitmap", lambda i, j: bitmap[i // 128, j // 128])
    for w in (8, 16):
        made[f"2-D local {w}"] = lambda w=w: box_window(
            (side, side), (8, 8), (1, 1), lambda y, x: (y.abs() < w) & (x.abs() < w), "2-D local"
        )
    made["3-D local 4"] = lambda: box_window(
        (n // 1024, 32, 32),
        (4, 4, 4),
        (1, 1, 1),
        lambda z, y, x: (z.abs() < 4) & (y.abs() < 4) & (x.abs() < 4),
        "3-D local",
    )
    made["strided"] = lambda: box_window((n,), (64,), (4,), lambda x: (x % 4 == 0) & (x.abs() < 256), "strided")
    return made

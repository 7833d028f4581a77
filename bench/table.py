"""The rows of bench/compare: collected, and printed as they come."""

import json
import statistics
import time

import measure
import page


class Table:
    def __init__(self, device, machine=None):
        self.rows, self.device, self.date = [], device, time.strftime("%Y-%m-%d")
        self.machine = machine or measure.processor()
        self.amx = device == "cpu" and measure.has_amx()
        self.generation = measure.generation() if device == "cpu" else None
        self.kernels, self.peaks = None, {}  # the program that measures peaks, if there is one; {threads: of each type}
        self.part = ""  # that is being measured
        self.earlier = []  # rows of other runs, which stay in the file
        print(f"{self.date}  {self.machine}\n{page.HEADER}", flush=True)

    def add(
        self,
        what,
        figure,
        unit,
        *,
        type="float32",
        d=64,
        causal=False,
        sequence=0,
        threads=0,
        spread=None,
        peer="",
        peer_figure=None,
        peer_spread=None,
        ratio=None,
        least=None,
        most=None,
        intensity=None,
        shape=None,
        rounds=None,
        peers=None,
        product=None,
    ):
        """least: of the ratio; most: of the figure; intensity: useful operations for each byte that must be moved;
        shape: batch x heads x tokens, where options chose them; rounds: in which both were timed;
        peers: the figures of all peers; product: that of a large matrix product of the same run. A row says the CPU's
        generation, if it has AMX and, of GFLOP/s, the peak of its type on so many threads, if that can be measured."""
        peak = self.peak(type, threads) if unit == "GFLOP/s" else None
        held = (least is None or ratio >= least) and (most is None or figure <= most)
        self.rows.append(
            dict(
                what=what,
                device=self.device,
                type=type,
                d=d,
                causal=causal,
                sequence=sequence,
                figure=figure,
                unit=unit,
                peer=peer,
                peer_figure=peer_figure,
                ratio=ratio,
                threads=threads,
                spread=spread,
                peer_spread=peer_spread,
                least_ratio=least,
                most=most,
                held=held,
                machine=self.machine,
                date=self.date,
                part=self.part,
                intensity=intensity,
            )
            | ({"shape": shape} if shape else {})
            | ({"rounds": rounds} if rounds else {})
            | ({"peers": peers, "product": product} if peers else {})
            | ({"amx": True} if self.amx else {})
            | ({"generation": self.generation} if self.generation else {})
            | ({"peak": peak} if peak else {})
        )
        print(page.line(self.rows[-1]), flush=True)

    def peak(self, type, threads):
        if self.kernels is None or threads == 0:
            return None
        if threads not in self.peaks:
            found = measure.peaks(self.kernels, threads)
            self.peaks[threads] = {name: max(figures) if figures else None for name, figures in found.items()}
        return measure.peak_of(type, self.peaks[threads])

    def rates(self, what, ours, theirs, work, unit, **columns):
        """A row of work / seconds (an amount a second, more is better) beside a peer's."""
        median = statistics.median
        self.add(
            what,
            work / median(ours),
            unit,
            peer_figure=work / median(theirs),
            spread=measure.spread(ours),
            peer_spread=measure.spread(theirs),
            ratio=measure.median_ratio(ours, theirs),
            rounds=len(ours),
            **columns,
        )

    def times(self, what, ours, theirs, unit, scale, **columns):
        """A row of seconds * scale (less is better) beside a peer's."""
        median = statistics.median
        self.add(
            what,
            median(ours) * scale,
            unit,
            peer_figure=median(theirs) * scale,
            spread=measure.spread(ours),
            peer_spread=measure.spread(theirs),
            ratio=measure.median_ratio(ours, theirs),
            rounds=len(ours),
            **columns,
        )

    def write(self, path):
        path.write_text(json.dumps(page.in_order(self.earlier + self.rows), indent=1) + "\n")

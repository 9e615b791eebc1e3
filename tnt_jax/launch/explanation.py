"""What the steps of a script consist of: what they take with one thing after another removed.

Its page is one HTML file with pictures in SVG, which loads nothing.
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from tnt_jax.launch.scale.scaling import Spread, read_results

EXPLANATION = "explain.json"
"""Name of the file with the results."""
_FORMAT = 1
# Of a step; smaller shares are not worth a change.
_WORTH_A_CHANGE = 0.05
# A change helps if its median is so much below that of what is used, and below its fastest round.
_HELPS = 0.98
# Of all rounds: in so many a share must be above zero, so that it is no accident.
_SURE = 0.8
# A rank is slow if it takes so much longer than the others at the median.
_SLOW = 1.2
# Pages that were read back from disk while steps ran.
_MANY_PAGES = 200
# Where half the rows take more of the time than this, rows cost less than starting a step.
_MOSTLY_FIXED = 0.75
_SLOW_FIRST_BATCH = 5.0
# Of a step, from which sums between hosts make another algorithm worth a thought; its steps between
# two updates.
_LINK_BOUND, _LOCAL_STEPS = 0.3, 50
# Below it, a copy takes the time of its start.
_SMALL_BYTES = 256 * 1024
# Batches that are timed while they are read, and how much longer than others some take in a burst.
_READ, _BURST = 8, 5.0
# Seconds of compiling that a cache would spare at each start.
_LONG_COMPILATION_S = 5.0
_Times = Sequence[float] | None
_PARTS = {
    "compiling": "compiling",
    "callbacks": "callbacks and logs",
    "reading": "reading data",
    "placing": "copying data to the devices",
    "sums": "sums",
    "waiting": "waiting for the slowest rank",
    "sharing": "sharing the machine",
    "computing": "computing",
}


class Part(NamedTuple):
    """A share of a step."""

    name: str
    seconds: Spread  # What it takes in a step, by round.
    share: float  # Median of that, of the median step.


@dataclass(frozen=True)
class Finding:
    """A cause, and what helps against it."""

    cause: str  # Its name, such as `"reading"`.
    text: str  # What was found.
    advice: str = ""  # What to change; empty if nothing that was tried has helped.
    gain: Spread | None = None  # By how much of a step that was measured to help.
    share: float = 0.0  # Of a step; findings with a larger one come first.

    @property
    def line(self) -> str:
        """Returns it as text."""
        if self.gain is None:
            return self.text
        low, high = (100 * value for value in (self.gain.lowest, self.gain.highest))
        return (
            f"{self.text} {self.advice}: tried, a step takes {100 * self.gain.median:.0f} % less "
            f"({low:.0f} to {high:.0f} %)."
        )


@dataclass(frozen=True)
class Explanation:
    """Where the time of a step goes."""

    script: str
    measured: Mapping[str, Any]  # What the first process of the script has measured.
    # Examples a second on all ranks, and on half of them, by round, if that was tried.
    fewer: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def slowest(self, kind: str) -> list[float] | None:
        """Returns the seconds of a step of a kind on the slowest process, by round."""
        rounds = self.measured["seconds"].get(kind)
        return rounds and [max(x for x in times if not math.isnan(x)) for times in rounds]

    @property
    def step(self) -> Spread:
        """Seconds of a step as it is."""
        return Spread.of(self.slowest("as is") or [math.nan])

    @property
    def parts(self) -> list[Part]:
        """What a step consists of; the shares add up to 1."""
        step, seconds = self.step.median, self._seconds()
        found = [
            Part(name, Spread.of(values), max(statistics.median(values), 0.0) / step)
            for name, values in seconds.items()
            if name != "computing"
        ]
        # What is measured by differences may add up to a little more than there is.
        excess = max(sum(part.share for part in found), 1.0)
        found = [part._replace(share=part.share / excess) for part in found]
        rest = 1.0 - sum(part.share for part in found)
        return [*found, Part("computing", Spread.of(seconds["computing"]), rest)]

    def _seconds(self) -> dict[str, list[float]]:
        """Returns the seconds of each part, by round: each kind lacks one thing more."""
        whole, quiet = self.slowest("as is") or [], self.slowest("no callbacks") or []
        kept, placed = self.slowest("kept batches") or [], self.slowest("placed batches") or []
        compiled = self.measured["compiled_s"]
        zeros = [0.0] * len(whole)
        in_whole, in_quiet = (compiled.get(name, zeros) for name in ("as is", "no callbacks"))
        whole, quiet = _less(whole, in_whole), _less(quiet, in_quiet)
        # Reading cannot hold a step up for longer than it takes.
        read_s = self.measured["read_mean_s"] + self._first_batch_of_step_s
        found = {
            "compiling": in_whole,
            "callbacks": _less(whole, quiet),
            "reading": [min(seconds, read_s) for seconds in _less(quiet, kept)],
            "placing": _less(kept, placed),
        }
        local = self.measured["seconds"].get("no sums")
        if local is None or self.measured["ranks"] == 1:
            return found | {"computing": placed}
        slowest, usual = self.slowest("no sums") or [], [statistics.median(x) for x in local]
        found |= {"sums": _less(placed, slowest), "waiting": _less(slowest, usual)}
        alone = self.slowest("one rank")
        if alone is None:
            return found | {"computing": usual}
        first = [times[0] for times in local]
        return found | {"sharing": _less(first, alone), "computing": alone}

    @property
    def _first_batch_of_step_s(self) -> float:
        """Seconds for the first batch of a pass, shared by the steps of the pass."""
        measured = self.measured
        return measured["first_batch_s"] / (measured["steps_of_epoch"] or measured["steps"])

    @property
    def sentence(self) -> str:
        """What a step consists of, in a sentence."""
        low, high = self.step.lowest, self.step.highest
        parts = sorted(self.parts, key=lambda part: -part.share)
        shares = ", ".join(
            f"{self._name_of(part)} {100 * part.share:.0f} %"
            for part in parts
            if part.share >= 0.005
        )
        return (
            f"A step takes {_ms(self.step.median)} ({_ms(low)} to {_ms(high)}), "
            f"{self.measured['rows'] / self.step.median:.4g} rows/s: {shares}."
        )

    def _name_of(self, part: Part) -> str:
        is_of_loop = part.name == "callbacks" and self.measured["trained_by"] != "fit"
        return "the loop between steps" if is_of_loop else _PARTS[part.name]

    @property
    def findings(self) -> list[Finding]:
        """The causes of shares that are worth a change, with what was tried and has helped.

        The one with the largest share comes first; one that makes others follow, before them.
        """
        found = [
            *self._of_compiling(),
            *self._of_callbacks(),
            *self._of_reading(),
            *self._of_sums(),
            *self._of_links(),
            *self._of_ranks(),
            *self._of_rows(),
            *self._of_convolutions(),
            *self._of_machine(),
        ]
        return sorted(found, key=lambda finding: -finding.share)

    def _share(self, name: str) -> float:
        return next((part.share for part in self.parts if part.name == name), 0.0)

    def _median_s(self, name: str) -> float:
        return statistics.median(self._seconds()[name])

    def _trials(self, what: str) -> list[Mapping[str, Any]]:
        return [trial for trial in self.measured["trials"] if trial["what"] == what]

    def _helping(self, what: str) -> list[Mapping[str, Any]]:
        """Returns the trials that have helped, the best first."""
        found = [each for each in self._trials(what) if _gain(each["before"], each["after"])]
        return sorted(found, key=lambda trial: statistics.median(trial["after"]))

    def _is_large(self, name: str) -> bool:
        seconds = self._seconds().get(name, [])
        is_sure = sum(value > 0 for value in seconds) >= _SURE * len(seconds)
        return is_sure and self._share(name) > _WORTH_A_CHANGE

    def _of_compiling(self) -> Iterator[Finding]:
        if self._is_large("compiling"):
            yield _tried(
                "recompilation",
                self._share("compiling"),
                f"Programs are compiled while steps run, because batches come in "
                f"{self.measured['num_shapes']} shapes: {'; '.join(self.measured['shapes'])}.",
                "Pad them to a few shapes",
                self.slowest("as is"),
                self.slowest("kept batches"),
            )

    def _of_callbacks(self) -> Iterator[Finding]:
        if not self._is_large("callbacks"):
            return
        share, trained_by = self._share("callbacks"), self.measured["trained_by"]
        if trained_by != "fit":
            line = self.measured["line"]
            what = (
                "such as reading a metric, for which it waits for the devices, or logging"
                if line is None
                else f"most of it in {line['file']}, line {line['number']} ({line['text']})"
            )
            text = (
                f"What the loop does between two calls of {trained_by} takes "
                f"{_ms(self._median_s('callbacks'))} of a step, {what}."
            )
            advice = "Do it once in many steps"
            pair = self.slowest("as is"), self.slowest("no callbacks")
            yield _tried("callback", share, text, advice, *pair)
            return
        tried, helping = self._trials("callback"), self._helping("callback")
        for trial in helping:
            yield _tried(
                "callback",
                share,
                f"{trial['name']} holds steps up: it acts after each, and waits for the devices "
                "where it reads the logs.",
                "Leave it out, or let it act at the end of an epoch",
                trial["before"],
                trial["after"],
            )
        if tried and not helping:
            alone = f"{tried[0]['name']} alone acts after each"
            which = "no single one does" if len(tried) > 1 else alone
            yield Finding("callback", f"Callbacks hold steps up; {which}.", share=share)

    def _of_reading(self) -> Iterator[Finding]:
        measured = self.measured
        if self._is_large("reading"):
            read_s, most_s = measured["read_s"], measured["read_most_s"]
            rest_s = statistics.median(self.slowest("placed batches") or [math.nan])
            how = "and takes time from the devices, whose processors it shares"
            if read_s > rest_s:
                how = "longer than the rest of a step"
            elif most_s > max(rest_s, _BURST * read_s):
                how = f"but one of {_READ} takes {_ms(most_s)}, and few are read ahead"
            yield _tried(
                "reading",
                self._share("reading"),
                f"Reading a batch takes {_ms(read_s)}, {how}.",
                "Keep what is read in memory, as dataset.cache() does",
                self.slowest("no callbacks"),
                self.slowest("kept batches"),
            )
        first, step = measured["first_batch_s"], self.step.median
        if first > _SLOW_FIRST_BATCH * max(measured["read_s"], step):
            text = f"The first batch of a pass over the data takes {_ms(first)}, as long as "
            of_step = self._first_batch_of_step_s
            share = of_step / (of_step + step)
            yield Finding("first batch", f"{text}{first / step:.0f} steps.", share=share)
        if self._is_large("placing") and measured["batch_bytes"] >= _SMALL_BYTES:
            text = f"Preparing and copying a batch of {measured['batch_bytes'] / 1e6:.3g} MB takes "
            text += f"{_ms(self._median_s('placing'))} of a step."
            yield Finding("placing", text, share=self._share("placing"))

    def _of_sums(self) -> Iterator[Finding]:
        if not self._is_large("sums"):
            return
        sums, seconds, share = self.measured["sums"], self._median_s("sums"), self._share("sums")
        text = (
            f"{sums['number']} exchange(s) of {sums['bytes'] / 1e6:.3g} MB take {_ms(seconds)}, "
            f"{8 * sums['bytes'] / seconds / 1e9:.2g} Gbit/s"
        )
        if sums["small"] > sums["number"] / 2:
            text += f"; {sums['small']} of them are below 64 KiB, whose time is that of a start"
        helping = self._helping("sums")
        if not helping:
            if comparison := self.measured.get("comparison"):
                text += f". {comparison}, so that the compiler chooses what is exchanged"
            elif self._trials("sums"):
                text += ". No other form of sums that was tried is faster"
            yield Finding("sums", f"{text}.", share=share)
            return
        # A form of sums that rounds gradients is for those who may accept that.
        best = min(helping, key=lambda trial: not trial["exact"])
        advice = f"Use {best['name']}{'' if best['exact'] else ', which rounds what is sent'}"
        yield _tried("sums", share, f"{text}.", advice, best["before"], best["after"])

    def _of_links(self) -> Iterator[Finding]:
        """Proposes local steps where links between hosts take much of a step; not tried here."""
        measured, hosts = self.measured, self.measured.get("hosts", 1)
        if hosts == 1 or (share := self._share("sums")) < _LINK_BOUND or not self._is_large("sums"):
            return
        mb = measured["sums"]["bytes"] / 1e6
        # A ring between hosts; and a byte for each float32, from each host to each other.
        before, after = 2 * (hosts - 1) / hosts * mb, (hosts - 1) * mb / 4 / _LOCAL_STEPS
        rest = self.step.median - self._median_s("sums")
        yield Finding(
            "link",
            f"The links between {hosts} hosts take {100 * share:.0f} % of a step, in which each "
            f"host sends {before:.3g} MB. Model(sync=tnt.LocalSteps(every={_LOCAL_STEPS}, "
            f'fragments=4, delay=5, compress="int8")) sends {after:.3g} MB a step, '
            f"{before / after:.0f} times less, while steps run, which then take at least "
            f"{_ms(rest)}. It is another algorithm, with other results, and was not tried "
            "(docs/local_steps.md).",
            share=share,
        )

    def _of_ranks(self) -> Iterator[Finding]:
        measured = self.measured
        if self._is_large("waiting"):
            rounds = measured["seconds"]["no sums"]
            own = [statistics.median(times) for times in zip(*rounds, strict=True)]
            slow = max(range(len(own)), key=own.__getitem__)
            others = statistics.median(own[:slow] + own[slow + 1 :])
            if own[slow] > _SLOW * others:
                text = (
                    f"Process {slow} computes a step in {_ms(own[slow])}, the others in "
                    f"{_ms(others)}: all wait for it."
                )
                # Sums wait for it, too.
                share = self._share("waiting") + self._share("sums")
                yield Finding("slow rank", text, share=share)
        if self._is_large("sharing"):
            number, cores = measured["processes"], measured["cores_of_machine"]
            text = (
                f"One process alone computes its rows faster than all {number} at a time: they "
                f"share {cores} cores."
            )
            advice = f"Start {'one process' if number < 4 else f'{number // 2} processes'}"
            times = {name: [1 / speed for speed in speeds] for name, speeds in self.fewer.items()}
            pair = times.get("all"), times.get("half")
            yield _tried("sharing", self._share("sharing"), text, advice, *pair)

    def _of_rows(self) -> Iterator[Finding]:
        half, whole = self.slowest("half the rows"), self.slowest("no sums")
        if half is None or whole is None:
            return
        ratios = [h / w for h, w in zip(half, whole, strict=True)]
        ratio = statistics.median(ratios)
        is_sure = sum(value > _MOSTLY_FIXED for value in ratios) >= _SURE * len(ratios)
        if not is_sure or not self._is_large("computing"):
            return
        text = (
            f"Half the rows take {100 * ratio:.0f} % of the time: batches are small, and most of "
            "a step is its start."
        )
        # What half the rows take twice does not depend on rows.
        share = self._share("computing") * min(2 * ratio - 1, 1.0)
        if self.measured["batch_bytes"] < _SMALL_BYTES:  # Nor does the start of a copy.
            share += self._share("placing")
        if (fused := next(iter(self._trials("fused")), None)) is None:
            yield Finding("small batch", text, share=share)
            return
        name, number = self.measured["trained_by"], fused["name"]
        advice = f"compile(steps_per_execution={number})"
        if name != "fit":
            advice = f"Call {name}.scan with batches of dataset.stacked({number})"
        yield _tried("small batch", share, text, advice, fused["before"], fused["after"])

    def _of_convolutions(self) -> Iterator[Finding]:
        step = self.step.median
        for trial in self._trials("channels")[:1]:
            before, after = trial["before"], trial["after"]
            # The convolutions alone were tried.
            gain = Spread.of([less / step for less in _less(before, after)])
            if _gain(before, after) and gain.median >= 1 - _HELPS:
                seconds = statistics.median(before)
                text = (
                    f"{trial['name']} convolution(s) have their channels before the dimensions of "
                    f"space, and take {_ms(seconds)} of a step."
                )
                yield Finding("convolution", text, "Put the channels last", gain, seconds / step)

    def _of_machine(self) -> Iterator[Finding]:
        faults, compile_s = self.measured["faults"], self.measured["compile_s"]
        if max(faults.values()) > _MANY_PAGES:
            text = (
                f"Memory is short: while steps ran, {faults['major']} pages of the process "
                f"were read from disk, and {faults['swapped']} were swapped in."
            )
            # Whatever else is slow may be so for this reason.
            yield Finding("memory", text, share=1.0)
        if not self.measured["cache"] and compile_s > _LONG_COMPILATION_S:
            yield Finding(
                "cache",
                f"Each start compiles for {compile_s:.1f} s, because no programs are kept "
                "(JAX_COMPILATION_CACHE_DIR is not set).",
            )

    @property
    def text(self) -> str:
        """Everything that was found, as text."""
        measured = self.measured
        title = (
            f"{self.script}: {measured['ranks']} rank(s) in {measured['processes']} process(es) on "
            f"{measured['device']}, global batch {measured['rows']}"
        )
        left_out = measured["callbacks_left_out"]
        notes = [f"Not called: {', '.join(left_out)}, which would save."] if left_out else []
        lines = [f"- {finding.line}" for finding in self.findings]
        return "\n".join([title, self.sentence, *lines, *notes])

    def __repr__(self) -> str:
        return self.text

    def to_json(self) -> str:
        """Returns everything as text that `from_json` reads."""
        kept = {
            "format": _FORMAT,
            "script": self.script,
            "sentence": self.sentence,
            "shares": {part.name: round(part.share, 4) for part in self.parts},
            "findings": [{**vars(each), "line": each.line} for each in self.findings],
            "fewer": self.fewer,
            "measured": self.measured,
        }
        return json.dumps(kept, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Explanation":
        """Returns what `to_json` made text of; a ValueError says that it is something else."""
        kept = read_results(text, "explain", _FORMAT, "measured")
        return cls(kept["script"], kept["measured"], kept["fewer"])

    def to_html(self) -> str:
        """Returns a page that a browser shows without a network."""
        title, *_ = map(escape, self.text.splitlines())
        parts = [part._replace(name=self._name_of(part)) for part in self.parts]
        kinds = {name: self.slowest(name) or [] for name in self.measured["seconds"]}
        items = "".join(f"<li>{escape(finding.line)}</li>" for finding in self.findings)
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}'
            f"</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
            f"<p>{escape(self.sentence)}</p>{_stacked(parts)}<h2>What is worth a change</h2>"
            f"<ul>{items or '<li>Nothing.</li>'}</ul>"
            f"<h2>Times of a step, round by round</h2>{_dots(kinds)}"
            f"<h2>Parts of a step</h2>{_table(parts)}</body></html>\n"
        )

    def _repr_html_(self) -> str:
        return self.to_html()


def _less(some: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(some, other, strict=True)]


def _gain(before: Sequence[float], after: Sequence[float]) -> Spread | None:
    """Returns by how much of a step a change helps, or None if it does not beyond doubt."""
    limit = min(_HELPS * statistics.median(before), min(before))
    if statistics.median(after) >= limit:
        return None
    return Spread.of([1 - b / a for a, b in zip(before, after, strict=True)])


def _tried(
    cause: str, share: float, text: str, advice: str, before: _Times, after: _Times
) -> Finding:
    """Returns a finding with advice, if that has helped."""
    gain = None if before is None or after is None else _gain(before, after)
    return Finding(cause, text, advice if gain else "", gain, share)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
_WIDTH, _BAR, _LINE = 720, 36, 26
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.2em; } h2 { font-size: 1.05em; margin-top: 1.6em; }
svg { max-width: 100%; height: auto; } text { font: 12px system-ui, sans-serif; fill: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: right; }
td:first-child, th:first-child { text-align: left; }
"""


def _stacked(parts: Sequence[Part]) -> str:
    shapes, left = [], 0.0
    for number, part in enumerate(parts):
        name, width, share = escape(part.name), part.share * _WIDTH, f"{100 * part.share:.0f} %"
        color = _COLORS[number % len(_COLORS)]
        x, y = (number % 3) * _WIDTH / 3, _BAR + 20 + number // 3 * 20
        shapes += [
            f'<rect x="{left:.1f}" y="0" width="{width:.1f}" height="{_BAR}" fill="{color}">'
            f"<title>{name}: {share}</title></rect>",
            f'<rect x="{x:.0f}" y="{y - 10}" width="10" height="10" fill="{color}"/>',
            f'<text x="{x + 15:.0f}" y="{y}">{name} {share}</text>',
        ]
        left += width
    height = _BAR + 30 + -(-len(parts) // 3) * 20
    return _svg(height, "Shares of a step", shapes)


def _dots(kinds: Mapping[str, Sequence[float]]) -> str:
    longest = max((max(times) for times in kinds.values() if times), default=1.0) or 1.0
    shapes, start = [], 150
    scale = (_WIDTH - start - 70) / longest
    for number, (name, times) in enumerate(kinds.items()):
        y = number * _LINE + 18
        shapes.append(f'<text x="0" y="{y + 4}">{escape(name)}</text>')
        shapes.append(f'<line x1="{start}" y1="{y}" x2="{_WIDTH - 70}" y2="{y}" stroke="#ddd"/>')
        shapes += [
            f'<circle cx="{start + scale * time:.1f}" cy="{y}" r="4" fill="#4269d0" opacity="0.6"/>'
            for time in times
        ]
        middle = 1000 * Spread.of(times).median
        shapes.append(f'<text x="{_WIDTH - 60}" y="{y + 4}">{middle:.3g} ms</text>')
    return _svg(len(kinds) * _LINE + 10, "Times of a step, by kind and round", shapes)


def _table(parts: Sequence[Part]) -> str:
    rows = "".join(
        f"<tr><td>{escape(part.name)}</td><td>{100 * part.share:.1f} %</td>"
        + "".join(f"<td>{1000 * value:.3g}</td>" for value in part.seconds)
        + "</tr>"
        for part in parts
    )
    heads = "".join(f"<th>{head}</th>" for head in ("", "share", "median ms", "lowest", "highest"))
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _svg(height: float, label: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(shapes)}</svg>"
    )

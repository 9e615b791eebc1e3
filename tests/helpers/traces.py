"""Reads timelines in Chrome's trace format."""

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path


def read_trace(path):
    """Returns the events of a file, checked: those of a thread are nested or apart, and end in
    the order of the file.
    """
    *events, end = json.loads(Path(path).read_text())
    assert end == {}
    assert events[0]["name"] == "process_name"
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["pid"] == events[0]["pid"]
            threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert set(threads) == named
    for spans in threads.values():
        ends = [end for _, end, _ in spans]
        # JAX's own events are timed by another clock, which agrees within a microsecond.
        assert all(a <= b + 1 for a, b in pairwise(ends))
        open_spans = []
        for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_spans and open_spans[-1] <= start + 1:
                open_spans.pop()
            assert not open_spans or end <= open_spans[-1] + 1, f"{name} ends after what it is in"
            open_spans.append(end)
    return [event for event in events if event["ph"] == "X"]


def sums_beside_kernels(path):
    """Returns for each kernel of NCCL, in a trace of JAX's profiler, whether another kernel of the
    same GPU ran meanwhile.
    """
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    kernels = [
        (event["pid"], event["ts"], event["ts"] + event["dur"], "nccl" in event["name"].lower())
        for event in events
        if event["ph"] == "X" and "GPU" in names.get(event["pid"], "")
    ]
    return [
        any(
            device == own and start < until and since < end and not is_sum
            for device, since, until, is_sum in kernels
        )
        for own, start, end, sums in kernels
        if sums
    ]

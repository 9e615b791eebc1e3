"""Projects the step of data-parallel training to more ranks than were measured.

Buckets of gradients become ready evenly over the last two thirds of the step, which backpropagation
takes, and travel one after the other: a bucket starts when it is ready and the one before is done.
A ring within hosts and one between hosts run at the rates of the links; each hop of a ring costs a
latency. Groups of local steps sum gradients by themselves and send outer updates to one another.
Nothing else grows with the number of ranks here: stragglers, input and shared switches do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

# Backpropagation computes two gradients for each product of the forward pass.
BACKWARD_SHARE = 2 / 3
# What a frame of Ethernet holds between its own header, those of IPv4 and TCP, and the time stamps.
TCP_PAYLOAD_SHARE = 1448 / 1514
# GB/s among which the rate of a link is looked for, 2 % apart.
_RATES = tuple(1e-3 * 1.02**power for power in range(900))


class Links(NamedTuple):
    """Figures of the links."""

    gpus_per_host: int  # GPUs, or other ranks, of a host.
    gpu_gbytes: float  # GB/s of one GPU to its neighbours in the host, each direction.
    host_gbytes: float  # GB/s of a host to others, each direction, all its cards together.
    gpu_latency_us: float  # Latency of a hop within a host.
    host_latency_us: float  # Latency of a hop between hosts.


def all_reduce_ms(mb: float, num_gpus: int, links: Links) -> float:
    """Returns how long a sum of `mb` MB (10**6 bytes) over GPUs takes, in ms."""
    # It is scattered within hosts, summed between them, and gathered within hosts.
    local = min(num_gpus, links.gpus_per_host)
    num_hosts = -(-num_gpus // links.gpus_per_host)
    within = _ring_ms(mb, local, links.gpu_gbytes, links.gpu_latency_us)
    # Each of a host's GPUs sums its part with those of the other hosts; together they send the
    # whole bucket through the host's cards.
    between = _ring_ms(mb, num_hosts, links.host_gbytes, links.host_latency_us)
    return within + between


def _ring_ms(mb: float, members: int, gbytes: float, latency_us: float) -> float:
    hops = 2 * (members - 1)
    return hops / members * mb / gbytes + hops * latency_us / 1000


def project(
    step_ms: float, buckets_mb: Sequence[float], num_gpus: int, links: Links, *, overlap: bool
) -> float:
    """Returns the projected step in ms, from the step of one GPU.

    Buckets are sent in this order; with `overlap` each travels while later ones are computed.
    """
    done = 0.0
    for index, mb in enumerate(buckets_mb):
        ready = step_ms
        if overlap:
            ready *= 1 - BACKWARD_SHARE * (1 - (index + 1) / len(buckets_mb))
        done = max(done, ready) + all_reduce_ms(mb, num_gpus, links)
    return done


class Measured(NamedTuple):
    """A number of ranks that was measured; `local_ms` is a step without communication."""

    ranks: int
    hosts: int
    step_ms: float
    local_ms: float


@dataclass(frozen=True)
class Outer:
    """The outer updates of groups that train by themselves, as of `tnt_jax.LocalSteps`."""

    ranks: int  # Of a group.
    every: int  # Steps in which a group sends all of its fragments once.
    fragments: int  # Their number.
    delay: int  # Steps that run while a fragment travels.
    mb: float  # What a group sends to each other one in `every` steps.

    def host_mb(self, ranks: int, ranks_per_host: int) -> float:
        """Returns what a host sends to others in `every` steps."""
        groups, own = ranks // self.ranks, max(ranks_per_host // self.ranks, 1)
        return own * max(groups - own, 0) * self.mb


@dataclass(frozen=True)
class Model:
    """The model of a script; with `overlap`, buckets travel during backpropagation."""

    buckets_mb: tuple[float, ...]
    links: Links
    overlap: bool
    outer: Outer | None = None

    def step_ms(self, ranks: int, local_ms: float) -> float:
        """Returns the projected step, from what it takes without communication."""
        outer, links = self.outer, self.links
        together = ranks if outer is None else min(ranks, outer.ranks)
        step_ms = project(local_ms, self.buckets_mb, together, links, overlap=self.overlap)
        if outer is None:
            return step_ms
        travel_ms = outer.host_mb(ranks, links.gpus_per_host) / outer.fragments / links.host_gbytes
        waiting_ms = max(travel_ms + links.host_latency_us / 1000 - outer.delay * step_ms, 0.0)
        return step_ms + waiting_ms * outer.fragments / outer.every

    def host_mb(self, ranks: int) -> float:
        """Returns what a host sends to others in a step, in the mean."""
        per_host = self.links.gpus_per_host
        if self.outer is not None:
            return self.outer.host_mb(ranks, per_host) / self.outer.every
        hosts = -(-ranks // per_host)
        return 2 * (hosts - 1) / hosts * sum(self.buckets_mb)


def why_not_projected(hosts: Mapping[int, int], *, link_gbit: float | None) -> str:
    """Returns why numbers of ranks, on so many hosts, do not suffice to project; or nothing."""
    several = [ranks for ranks, number in hosts.items() if number > 1]
    if len(several) >= (2 if link_gbit is None else 1):
        return ""
    if link_gbit is not None:
        return (
            "with --link-gbit a number of ranks on several hosts must be measured, by which the "
            "error is found"
        )
    return (
        "at least two numbers of ranks on several hosts must be measured: the smaller ones tell "
        "the rate of the links, the largest one the error; or give the rate with --link-gbit, and "
        "measure one"
    )


def fit(
    measured: Sequence[Measured],
    buckets_mb: Sequence[float],
    *,
    gpus_per_host: int,
    link_gbit: float | None = None,
    outer: Outer | None = None,
) -> Model:
    """Returns the model that is closest to what was measured, by the squares of relative errors.

    `gpus_per_host` are the ranks of a full host; the rate of a link is found unless it is given.
    """
    within = [one for one in measured if one.ranks > 1 and one.hosts == 1]
    between = [one for one in measured if one.hosts > 1]
    rate = math.inf if link_gbit is None else link_gbit / 8 * TCP_PAYLOAD_SHARE
    links = Links(gpus_per_host, math.inf, rate, 0, 0)
    models = [Model(tuple(buckets_mb), links, overlap, outer) for overlap in (True, False)]
    models = [_best(model, "gpu_gbytes", within) for model in models]
    if link_gbit is None:
        models = [_best(model, "host_gbytes", between) for model in models]
    return min(models, key=lambda model: _squares(model, measured))


def _squares(model: Model, measured: Sequence[Measured]) -> float:
    """Returns the sum of the squares of relative errors, on a logarithmic scale."""
    return sum(
        math.log(model.step_ms(one.ranks, one.local_ms) / one.step_ms) ** 2 for one in measured
    )


def _best(model: Model, name: str, measured: Sequence[Measured]) -> Model:
    """Returns the model with the rate of one kind of links that is closest to what was measured."""
    if not measured:
        return model
    choices = (replace(model, links=model.links._replace(**{name: rate})) for rate in _RATES)
    return min(choices, key=lambda choice: _squares(choice, measured))

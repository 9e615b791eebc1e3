"""Training steps whose gradients travel while the program computes, and how fast such steps could
be at best.

Contenders of `benchmarks/allreduce.py`, all the same network and the same bytes:

- `beside`: the bytes travel from the start of the step on. What sending takes from the processor.
- `from first gradient`: the bytes travel from the moment on at which the first gradient exists, and
  nothing is added up. No step whose weights are complete when it ends can be faster than sending
  from there on.
- `ring deferred`: the step ends when all sums have started. The next one waits for a layer's sum,
  and updates its weights, right before the layer is used, and the sums of first layers overtake
  those of last layers (Jayarajan et al. 2019, arXiv:1905.03960). It computes the same numbers, one
  step later; a last call would have to complete the weights.
"""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tnt_jax.distributed.cpu_ring.ring import Ring

LEARNING_RATE = 0.01


class Link:
    """Sends bytes to the next process and receives as many from the one before, in threads."""

    def __init__(self, to_next: socket.socket, from_previous: socket.socket, nbytes: int) -> None:
        self._next, self._previous = to_next, from_previous
        self._sent, self._received = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._threads = [
            threading.Thread(target=self._send),
            threading.Thread(target=self._receive),
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        self._next.sendall(self._sent.data)

    def _receive(self) -> None:
        size = len(self._received)
        if self._previous.recv_into(self._received.data, size, socket.MSG_WAITALL) < size:
            raise ConnectionResetError("The process before has gone.")


def beside(step: Callable[[], None] | None, link: Link, *, starts: bool) -> Callable[[], None]:
    """Returns what runs a step while bytes travel, and ends when both are done.

    Args:
        step: The step; None for the bytes alone.
        link: The link.
        starts: Whether the bytes travel from the start on; otherwise the step itself starts them.
    """

    def run() -> None:
        if starts:
            link.start()
        if step is not None:
            step()
        link.wait()

    return run


def step(
    exchange: str,
    loss: Callable,
    params: list[Any],
    x: Any,
    *,
    ring: Ring | None,
    link: Link | None,
    tickets: list[Any],
) -> tuple[Any, Any]:
    """Returns updated weights and what the program must return besides, inside a jitted program.

    Args:
        exchange: Name of the contender.
        loss: From weights and inputs to the loss.
        params: Weights of the MLP, one array a layer.
        x: Inputs [rows, width].
        ring: Sums of the contenders that sum.
        link: Bytes that travel in others.
        tickets: Sums that were started, one a layer, or None.
    """
    import jax

    from tnt_jax.distributed.backward_order import trace_grads

    if ring is not None:
        grads, updated = jax.grad(
            lambda params: deferred_loss(ring, tickets, params, x), has_aux=True
        )(params)
        return updated, start_sums(ring, tickets, grads)
    _, grads, order = trace_grads(lambda params: jax.value_and_grad(loss)(params, x), params)
    started = (
        start_at_first_gradient(link, grads, order)
        if link is not None and exchange == "from first gradient"
        else None
    )
    return [
        param - LEARNING_RATE * grad for param, grad in zip(params, grads, strict=True)
    ], started


def start_at_first_gradient(link: Link, grads: Sequence[Any], order: Sequence[int]) -> Any:
    """Returns what a jitted program must return so that bytes travel from its first gradient on."""
    import jax
    from jax.experimental import io_callback

    def start(_: Any) -> Any:
        link.start()
        return np.int32(0)

    return io_callback(start, jax.ShapeDtypeStruct((), np.int32), grads[order[0]])


def start_sums(ring: Ring, tickets: list[Any], grads: Sequence[Any]) -> Any:
    """Starts the sum of each gradient when it is finished, inside a jitted program; returns what is
    there when all have started.
    """
    import jax
    from jax.experimental import io_callback

    def start(index: int, grad: Any) -> Any:
        tickets[index] = ring.start([np.asarray(grad)], priority=-index)
        return np.int32(index)

    before = np.int32(0)
    for index in reversed(range(len(grads))):
        # Each start waits for the one before, so that all processes start in one order.
        begin = io_callback(
            lambda grad, _, index=index: start(index, grad),
            jax.ShapeDtypeStruct((), np.int32),
            grads[index],
            before,
        )
        before = begin
    return before


def wait_for_sum(ring: Ring, tickets: list[Any], index: int, like: Any, after: Any) -> Any:
    """Returns the sum of a gradient inside a jitted program, which waits for it once `after`, a
    number, is computed.
    """
    import jax
    from jax.experimental import io_callback

    def wait(_: Any) -> Any:
        ticket, tickets[index] = tickets[index], None
        return np.zeros(like.shape, like.dtype) if ticket is None else ring.wait(ticket)[0]

    return io_callback(wait, jax.ShapeDtypeStruct(like.shape, like.dtype), after)


def deferred_loss(
    ring: Ring, tickets: list[Any], params: Sequence[Any], x: Any
) -> tuple[Any, list[Any]]:
    """Returns the loss of the MLP with weights updated by the sums of the step before, and these
    weights.
    """
    import jax
    import jax.numpy as jnp

    updated = []
    for index, kernel in enumerate(params):
        total = wait_for_sum(ring, tickets, index, kernel, jax.lax.stop_gradient(x[0, 0]))
        updated.append(kernel - LEARNING_RATE * jax.lax.stop_gradient(total))
        x = jnp.tanh(x @ updated[-1])
    return jnp.mean(x**2), updated

"""Which processes of an elastic job train together: the launcher decides, and nobody else.

A *generation* is a numbered set of processes that share sums. It ends when one of them is lost, or,
after the step that runs, when a process that was started in its place is ready to join. Every
process of it then leaves its sums, reports how far it has come, and waits; once all that live have
done so, the launcher forms the next generation. A process that cannot reach the launcher is in
none, so two sets never both go on.

A process reports, in one JSON object each, over its supervisor:
    here        it runs: every second, from a thread
    ready       it has left its generation, or waits to join one: its `place`, and an `address` at
                which a coordinator could listen
    ended       a call of the script has ended, with its `result`
    on          the first step of the generation is done
    stuck       the process of an `index` makes no progress, and `why`
    can_change  whether the generation can change from here on, or the `obstacle`; the `call` that a
                process can join, or -1; the `sizes` that generations can have, None for any
    refuses     it cannot join, and `why`; it ends then

The launcher sends it:
    interrupt   the generation has ended, and `why`: `at_once`, or after the step that runs, which
                an empty `why` takes back
    form        the next one: its number, the process's index, how many they are, the coordinator's
                address, and the index of the process with the newest state
    calls       for one that joins, the results of all calls of the script that have ended, and the
                number of the `latest` that trains
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A process that is lost sooner after it was started, so many times in a row, is not started again.
_EARLY_S, _MOST_EARLY = 30.0, 3
# A host that is lost so many times does not come back.
_MOST_HOST_LOSSES = 3
# Generations in a row without a step after which the processes are taken to be unable to train.
_MOST_WITHOUT_STEP = 8
_COULD_NOT = "could not go on"
# Processes end the same step within less, where one joins; one that is later has begun another.
_LEAVES_S = 0.5
# After a pause of the launcher itself, messages are still unread.
_PAUSE_S = 3.0


class Actions(NamedTuple):
    """What the launcher does for a membership."""

    tell: Callable[..., None]  # Sends a message, its fields as keywords, to the process of a rank.
    start: Callable[[int], None]  # Starts a process in the place of one that was lost.
    kill: Callable[[int], None]  # Ends a process at once.
    show: Callable[[int], None]  # Shows what a process prints from here on: it is the master.
    say: Callable[[str], None]  # Shows one line to the user.
    give_up: Callable[[str], None]  # Ends the attempt as a failure, for a reason.


@dataclass
class _Seat:
    """The process of one rank, whichever runs at the moment."""

    host: str
    started_at: float
    is_running: bool = True
    is_in: bool = True  # Whether it belongs to the generation.
    # What it reported of its place, once it waits for the next generation; else empty.
    ready: Mapping[str, Any] = field(default_factory=dict)
    heard_at: float | None = None  # When it last reported something; None before it has.
    losses: int = 0  # Processes of this rank in a row that were lost early.


class Membership:
    """The processes of a job, by rank on these hosts, and its generations.

    Training goes on with `at_least` processes; one counts as lost after `silence_s` seconds without
    a message.
    """

    def __init__(
        self, hosts: Mapping[int, str], *, at_least: int, silence_s: float, actions: Actions
    ) -> None:
        now = time.monotonic()
        self._seats = {rank: _Seat(host, now) for rank, host in hosts.items()}
        self._at_least, self._silence_s, self._actions = at_least, silence_s, actions
        self._lost_hosts: set[str] = set()
        self._host_losses: Counter[str] = Counter()
        # Results of the calls of the script, and the number of the latest that trains.
        self._calls: list[Any] = []
        self._latest = -1
        # The processes of the generation, the master first.
        self._order = sorted(hosts)
        self._number = 0
        # The last generation of which one was stuck.
        self._stuck = -1
        self._without_step = 0
        self._ticked_at = now
        # Why the generation has ended; empty while it trains.
        self._causes: list[str] = []
        self._since = now
        # Whether it has ended at once, and when the first process left it.
        self._is_cut = False
        self._left_at: float | None = None
        # What to show once training goes on: the causes, the generation, and since when it did not.
        self._news: tuple[list[str], str, float] | None = None
        # Why the generation cannot change at the moment; empty within a call that can go on.
        self._obstacle = "no call of fit, evaluate or predict has begun"
        self._sizes: Sequence[int] | None = None
        self._is_over = False

    # What the processes report.

    def heard(self, rank: int, message: Mapping[str, Any]) -> None:
        """Takes a message of a process."""
        seat = self._seats[rank]
        if self._is_over and seat.is_in and message["kind"] == "ready":
            seat.ready = message
            self._give_up_if_over()
        if not seat.is_running or self._is_over:
            return
        is_first, seat.heard_at = seat.heard_at is None, time.monotonic()
        if is_first and not seat.is_in:
            self._send_calls()
        match message["kind"]:
            case "ready":
                self._take_ready(rank, seat, message)
            case "ended":
                self._take_result(message)
            case "on":
                self._take_step(message)
            case "stuck":
                self._end_stuck(message)
            case "can_change":
                self._obstacle, self._sizes = message["obstacle"], message["sizes"]
                self._latest = max(self._latest, message["call"])
                self._take_back_end()
                self._send_calls()
                self._admit()
            case "refuses":
                seat.losses = _MOST_EARLY
                self._actions.say(f"Process {rank} does not join: {message['why']}")

    def _take_ready(self, rank: int, seat: _Seat, message: Mapping[str, Any]) -> None:
        seat.ready = message
        if not seat.is_in and message["call"] < len(self._calls):
            seat.ready = {}  # The call has ended meanwhile, as `_take_result` says.
        elif not seat.is_in:
            self._admit()
        elif not self._causes and message.get("number", self._number) == self._number:
            self._interrupt(f"process {rank} {_COULD_NOT}: {message['why']}")
        if seat.is_in and self._causes and self._left_at is None:
            self._left_at = time.monotonic()
        self._form()

    def _take_back_end(self) -> None:
        """Lets the generation go on if its call has ended with the step that was to be its last."""
        if self._obstacle and self._causes and not self._is_cut and self._left_at is None:
            self._causes, self._without_step = [], 0
            self._tell_end("", at_once=False)

    def _end_stuck(self, message: Mapping[str, Any]) -> None:
        if message["number"] == self._number > self._stuck and not self._is_cut:
            self._stuck = self._number  # The others report it, too.
            self._actions.say(message["why"])
            self._actions.kill(self._order[message["index"]])

    def _admit(self) -> None:
        """Lets processes join that wait for the call in which the others are."""
        if self._obstacle or self._is_over:
            return
        waiting = self._waiting
        if self._causes or self._can_train(len(self._members) + len(waiting)):
            for rank, seat in waiting.items():
                self._interrupt(f"process {rank} joins on {seat.host}", at_once=False)

    def _take_result(self, message: Mapping[str, Any]) -> None:
        if message["call"] != len(self._calls):
            return  # Another process has reported it.
        self._calls.append(message["result"])
        for seat in self._waiting.values():
            if seat.ready["call"] < len(self._calls):
                seat.ready = {}  # It goes on to the next one.
        self._send_calls()

    def _send_calls(self) -> None:
        """Sends processes that are to join the calls that the others have made."""
        for rank, seat in self._seats.items():
            if seat.is_running and not seat.is_in and seat.heard_at is not None:
                self._actions.tell(rank, kind="calls", results=self._calls, latest=self._latest)

    def _take_step(self, message: Mapping[str, Any]) -> None:
        self._without_step = 0
        if self._news is not None and not self._causes:
            causes, generation, since = self._news
            self._news = None
            passed_s = time.monotonic() - since
            moment = time.strftime("%H:%M:%S", time.localtime(time.time() - passed_s))
            self._actions.say(
                f"{moment}: {'; '.join(causes)}. {generation} goes on at {message['place']}, "
                f"{passed_s:.1f} s later."
            )

    # What happens to them.

    def lost(self, rank: int, how: str) -> bool:
        """Handles the end of a process; returns False if the job cannot go on without it."""
        seat = self._seats[rank]
        if self._is_over and not seat.is_in:
            seat.is_running = False
            return True
        if not self._is_over and seat.is_in and self._obstacle and not self._causes:
            self._is_over = True
            self._actions.say(
                f"Process {rank} on {seat.host} {how}. Training cannot go on in place: "
                f"{self._obstacle}."
            )
        if self._is_over:
            return False
        was_in, seat.is_running, seat.is_in, seat.ready = seat.is_in, False, False, {}
        if seat.losses < _MOST_EARLY:
            has_lasted = time.monotonic() - seat.started_at > _EARLY_S
            seat.losses = 0 if has_lasted else seat.losses + 1
        if was_in:
            self._interrupt(f"process {rank} on {seat.host} {how}")
        elif seat.losses < _MOST_EARLY:
            self._actions.say(f"Process {rank} on {seat.host}, which was to join, {how}.")
        self._replace(rank, seat)
        self._form()
        return True

    def is_joining(self, rank: int) -> bool:
        """Returns whether a process belongs to no generation, or has refused to join one."""
        return not self._seats[rank].is_in or self._seats[rank].losses >= _MOST_EARLY

    def lost_host(self, host: str, reason: str) -> bool:
        """Handles the loss of a host; returns False if the job cannot go on without it."""
        self._lost_hosts.add(host)
        self._host_losses[host] += 1
        ranks = [r for r, seat in self._seats.items() if seat.host == host and seat.is_running]
        goes_on = [self.lost(rank, f"is out of reach ({reason})") for rank in ranks]
        return all(goes_on)

    def may_return(self, host: str) -> bool:
        """Returns whether a host that is lost may take part again once it can be reached."""
        return not self._is_over and self._host_losses[host] < _MOST_HOST_LOSSES

    def returned_host(self, host: str) -> None:
        """Starts the processes of a host that was lost and can be reached again."""
        self._lost_hosts.discard(host)
        for rank, seat in self._seats.items():
            if seat.host == host and not seat.is_running:
                self._replace(rank, seat)

    def ended(self, rank: int) -> None:
        """Notes that a process has come to the end of its script."""
        seat = self._seats[rank]
        seat.is_running = False
        if not seat.is_in:
            self._form()  # The others may have waited for it.
        elif not self._is_over:
            # They would wait for a call that nobody makes any more.
            for other, waiting in self._seats.items():
                if waiting.is_running and not waiting.is_in:
                    self._actions.kill(other)
            self._is_over = True
            self._give_up_if_over()

    def tick(self) -> None:
        """Looks for processes that are silent; call it a few times a second."""
        now = time.monotonic()
        if now - self._ticked_at > _PAUSE_S:
            for seat in self._seats.values():
                seat.heard_at = None if seat.heard_at is None else now
        self._ticked_at = now
        if self._is_over:
            return
        if self._left_at and not self._is_cut and now - self._left_at > _LEAVES_S:
            self._tell_end(self._causes[-1], at_once=True)
        for rank, seat in self._seats.items():
            silent_s = 0.0 if seat.heard_at is None else now - seat.heard_at
            if seat.is_running and silent_s > self._silence_s:
                seat.heard_at = now
                text = f"has been silent for {silent_s:.0f} s, and is ended."
                self._actions.say(f"Process {rank} on {seat.host} {text}")
                self._actions.kill(rank)

    # Generations.

    @property
    def _members(self) -> dict[int, _Seat]:
        return {rank: seat for rank, seat in self._seats.items() if seat.is_in}

    @property
    def _waiting(self) -> dict[int, _Seat]:
        return {rank: seat for rank, seat in self._seats.items() if seat.ready and not seat.is_in}

    def _interrupt(self, why: str, *, at_once: bool = True) -> None:
        if not self._causes:
            self._since = time.monotonic()
            self._without_step += 1
        # A broken connection is often seen before the loss that has broken it.
        causes = [cause for cause in self._causes if _COULD_NOT not in cause and cause != why]
        self._causes = [*causes, why]
        self._tell_end(why, at_once=at_once)

    def _tell_end(self, why: str, *, at_once: bool) -> None:
        self._is_cut |= at_once
        message = {"number": self._number, "why": why, "at_once": at_once}
        for rank in self._members:
            self._actions.tell(rank, kind="interrupt", **message)

    def _replace(self, rank: int, seat: _Seat) -> None:
        if seat.host in self._lost_hosts:
            return
        if seat.losses >= _MOST_EARLY:
            self._actions.say(f"Process {rank} on {seat.host} is left out from here on.")
            return
        seat.is_running, seat.started_at, seat.heard_at = True, time.monotonic(), None
        self._actions.start(rank)

    def _form(self) -> None:
        """Forms the next generation, once all that live of the last one wait for it."""
        members = self._members
        if not self._causes or not all(seat.ready for seat in members.values()):
            return
        if self._without_step > _MOST_WITHOUT_STEP:
            self._give_up(f"no step was done in {_MOST_WITHOUT_STEP} tries")
            return
        # How far each has come; one that is lost, or joins, counts as the least.
        done = {rank: tuple(seat.ready["done"]) for rank, seat in members.items()}
        if not any(done.values()):
            self._give_up("no process is left that has the state of training")
            return
        calls = {seat.ready["call"] for seat in members.values()}
        if len(calls) > 1:
            self._give_up("the processes were in different calls of the script")
            return
        # Of those with the newest state the first.
        source = max(self._order, key=lambda rank: done.get(rank, ()))
        joins = sorted(rank for rank, seat in self._waiting.items() if seat.ready["call"] in calls)
        known = {*members, *joins}
        while joins and not self._can_train(len(members) + len(joins)):
            joins.pop()
        # The master stays, and who joins comes last.
        ranks = [rank for rank in self._order if rank in members] + joins
        if not self._can_train(len(ranks)):
            if not any(seat.is_running for rank, seat in self._seats.items() if rank not in known):
                self._give_up(f"{len(known)} process(es) are left, {self._what_lacks(len(known))}")
            return
        self._start_generation(ranks, source)

    def _can_train(self, size: int) -> bool:
        return size >= self._at_least and (self._sizes is None or size in self._sizes)

    def _what_lacks(self, size: int) -> str:
        if size < self._at_least or self._sizes is None:
            return f"fewer than {self._at_least}"
        return f"and the model computes on {' or '.join(map(str, self._sizes))} only"

    def _start_generation(self, ranks: Sequence[int], source: int) -> None:
        self._number += 1
        self._is_cut, self._left_at = False, None
        if ranks[0] != self._order[0]:
            self._actions.show(ranks[0])
        self._order = list(ranks)
        first = self._seats[ranks[0]].ready
        is_one_host = len({self._seats[rank].host for rank in ranks}) == 1
        address = first["local_address"] if is_one_host else first["address"]
        for index, rank in enumerate(ranks):
            seat = self._seats[rank]
            seat.is_in, seat.ready = True, {}
            self._actions.tell(
                rank,
                kind="form",
                number=self._number,
                index=index,
                size=len(ranks),
                address=address,
                source=ranks.index(source),
            )
        # The generation before may have done no step.
        earlier, _, since = self._news or ([], "", self._since)
        causes = [cause for cause in earlier if _COULD_NOT not in cause] + self._causes
        generation = f"Generation {self._number} of {len(ranks)} process(es)"
        self._news = (list(dict.fromkeys(causes)), generation, since)
        self._causes = []

    def _give_up_if_over(self) -> None:
        """Ends processes that wait for a generation without one that has ended its script."""
        if any(seat.ready for seat in self._members.values()):
            self._give_up("a process has come to the end of its script meanwhile")

    def _give_up(self, reason: str) -> None:
        self._is_over = True
        causes = "; ".join(self._causes)
        self._actions.give_up(f"{causes}. Training cannot go on in place: {reason}.")

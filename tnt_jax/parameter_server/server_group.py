"""The servers as one: variables in one order of versions, snapshots, and lost servers.

Calls of an actor run in the order in which they were made, so the order of the calls here is that
of the versions on every server.
"""

from collections.abc import Sequence
from typing import Any

from tnt_jax.log import logger
from tnt_jax.parameter_server.crew import Crew
from tnt_jax.parameter_server.server import Layout, Snapshot, WrongVersion, make_totals
from tnt_jax.parameter_server.staleness import Statistics


class ServerFailure(Exception):
    """Updates of a server were lost."""


class ServerGroup:
    """Holds the variables of a model on all servers.

    Args:
        crew: The actors.
        statistics: What is counted.
        checkpoint_every: Updates between two snapshots.

    Attributes:
        version: Number of updates so far.
    """

    def __init__(self, crew: Crew, statistics: Statistics, *, checkpoint_every: int) -> None:
        self.version = 0
        self._crew = crew
        self._ray = crew.ray
        self._statistics = statistics
        self._checkpoint_every = checkpoint_every
        self._layout: Layout | None = None
        self._snapshots: list[Snapshot] = []
        self._updates: list[Any] = []
        self._pulled: tuple[int, list[Any]] | None = None
        self._is_suspect = False

    @property
    def kept_version(self) -> int:
        """The version of the last snapshot."""
        return self._snapshots[0].version

    def load(self, layout: Layout, snapshots: Sequence[Snapshot]) -> None:
        """Gives the servers a layout and variables."""
        self._layout = layout
        self.give(snapshots)

    def give(self, snapshots: Sequence[Snapshot]) -> None:
        """Gives variables to the servers, in place of those that they hold."""
        layout = self._ray.put(self._layout)
        self._snapshots = list(snapshots)
        self.version = snapshots[0].version
        self._updates, self._pulled = [], None
        asked = [
            server.load.remote(layout, snapshot)
            for server, snapshot in zip(self._crew.servers, snapshots, strict=True)
        ]
        self._crew.get(asked)

    def pull(self) -> list[Any]:
        """Returns references to the variables of this version, one for each server."""
        if self._pulled is None or self._pulled[0] != self.version:
            pulled = [server.pull.remote() for server in self._crew.servers]
            self._pulled = (self.version, pulled)
        return self._pulled[1]

    def update(self, shares: Sequence[Sequence[Any]], *, is_latest: bool) -> None:
        """Orders one update.

        Args:
            shares: For each share of a batch, in order, references to what each server gets.
            is_latest: Whether they were computed with the variables of this version.

        Raises:
            ServerFailure: If updates of a server were lost. If the version is unchanged, the update
                was not ordered.
        """
        assert self._layout is not None
        servers = self._crew.servers
        pushes = list(zip(*shares, strict=True))

        def ask(totals: list[Any]) -> list[Any]:
            asked = [
                server.partials.remote(totals, *of_server)
                for server, of_server in zip(servers, pushes, strict=True)
            ]
            return self._get(asked)

        totals = make_totals(self._layout.optimizer, ask)
        self._updates += [
            server.update.remote(self.version, totals, is_latest, *of_server)
            for server, of_server in zip(servers, pushes, strict=True)
        ]
        self.version += 1
        self._statistics.updates += 1
        if self.version - self.kept_version >= self._checkpoint_every:
            self.keep_snapshot()

    def suspect(self) -> None:
        """Has the next `check` ask all servers whether they are there."""
        self._is_suspect, self._pulled = True, None

    def check(self) -> None:
        """Raises a ServerFailure if a server was lost, or an update that has ended failed."""
        if self._is_suspect:
            self._is_suspect = False
            self._get([server.version.remote() for server in self._crew.servers])
        if not self._updates:
            return
        done, self._updates = self._ray.wait(
            self._updates, num_returns=len(self._updates), timeout=0
        )
        self._get(done)

    def keep_snapshot(self) -> None:
        """Waits for the servers and keeps what they hold, for when one of them is lost.

        Raises:
            ServerFailure: If updates of a server were lost.
        """
        self._snapshots = self.snapshots()

    def snapshots(self) -> list[Snapshot]:
        """Waits for the servers and returns what they hold, all at this version.

        Raises:
            ServerFailure: If updates of a server were lost.
        """
        snapshots = self._get([server.snapshot.remote() for server in self._crew.servers])
        if any(snapshot.version != self.version for snapshot in snapshots):
            raise ServerFailure
        self._updates = []
        return snapshots

    def roll_back(self) -> None:
        """Starts lost servers again, and takes all servers back to the last snapshot."""
        lost = self._start_lost_servers()
        redone = self.version - self.kept_version
        self._statistics.redone_updates += redone
        logger.warning(
            "Server(s) %s of the parameter server were lost. All go back to version %d; %d "
            "update(s) are made again.", lost, self.kept_version, redone,
        )  # fmt: skip
        self.give(self._snapshots)

    def go_on(self) -> None:
        """Starts lost servers again from the last snapshot; the others keep what they have.

        The updates of the lost servers since the snapshot are lost, which is said.
        """
        while True:
            lost = self._start_lost_servers()
            try:
                self._bring_back(lost)
                self.keep_snapshot()
                return
            except ServerFailure:
                continue

    def _bring_back(self, lost: list[int]) -> None:
        layout = self._ray.put(self._layout)
        for number in lost:
            server = self._crew.servers[number]
            self._get([server.load.remote(layout, self._snapshots[number])])
        for number, server in enumerate(self._crew.servers):
            reached = self._get([server.version.remote(self.version)])[0]
            missed = self.version - reached
            self._statistics.lost_updates += missed
            if missed:
                why = (
                    f"was lost and starts again from its checkpoint of version {reached}"
                    if number in lost
                    else "could not read all gradients, because the node that held them is gone"
                )
                logger.warning(
                    "Server %d of the parameter server %s: %d update(s) of its variables are lost.",
                    number, why, missed,
                )  # fmt: skip
        self._updates, self._pulled = [], None

    def _get(self, refs: list[Any]) -> list[Any]:
        """Returns answers of servers.

        Raises:
            ServerFailure: If one was lost, or is at another version.
        """
        try:
            return self._ray.get(refs)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if cause is None or isinstance(cause, (self._ray.exceptions.RayError, WrongVersion)):
                raise ServerFailure from error
            raise RuntimeError(f"A server of the parameter server failed: {cause!r}") from error

    def _start_lost_servers(self) -> list[int]:
        lost = []
        for number, server in enumerate(self._crew.servers):
            try:
                self._ray.get(server.version.remote())
            except self._ray.exceptions.RayActorError:
                self._crew.replace_server(number)
                lost.append(number)
        self._statistics.lost_servers += len(lost)
        return lost

"""Checkpoints of `fit`: where they are, what run they belong to, and where it resumes."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from tnt_jax.data.elements import unpack
from tnt_jax.data.permutation import row_order_of
from tnt_jax.data.sources import HostBatch, checksum_of
from tnt_jax.data.streams import EpochStream
from tnt_jax.distributed import stopping
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.host.comparison import describe_differences
from tnt_jax.distributed.stopping import Points
from tnt_jax.job import Slot
from tnt_jax.keras_compat.callbacks import BackupAndRestore, CallbackList, RayReport
from tnt_jax.keras_compat.callbacks.base import first_base, flat, unwrapped
from tnt_jax.keras_compat.callbacks.callback_list import describe_callbacks
from tnt_jax.keras_compat.callbacks.tuners import backup_on_ray, ray_storage
from tnt_jax.keras_compat.comparable import comparable
from tnt_jax.keras_compat.comparable import flat as flat_settings
from tnt_jax.keras_compat.compiling.compiled import Compiled
from tnt_jax.keras_compat.fit.data_intake import Plan
from tnt_jax.keras_compat.fit.hooks import Place, Progress
from tnt_jax.keras_compat.fit.start_check import (
    describe_compilation,
    describe_model,
    installed_versions,
)
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.log import logger
from tnt_jax.on_ray.worker import role
from tnt_jax.settings import PREEMPTED_EXIT_CODE, read_settings
from tnt_jax.train.checkpoints.checkpoint import Position
from tnt_jax.train.checkpoints.data_position import DataPosition, batches_done, describe_position
from tnt_jax.train.contracts import Batch
from tnt_jax.train.state import state_arrays, with_arrays

_DIR, _EVERY = "TNT_CHECKPOINT_DIR", "TNT_CHECKPOINT_EVERY"
CHANGES = ("model", "optimizer", "learning_rate", "loss", "metrics", "data", "batch_size")
"""Names that `tnt_ignore_changes` takes."""
# Options of `Model` that change results by more than rounding, besides the seed.
_OPTIONS = """
    precision trainable frozen synchronize_batch_norm gradient_compression sync
""".split()
_LOSS = ("loss", "objective", "class_weight")
_RATE_STEPS = (0, 1, 10, 100, 1000, 10_000)
# Rows of which there is a checksum: processes may hold few rows of a batch.
_FIRST_ROWS = (1, 2, 4, 8)
RATE_CALLBACKS = ("LearningRateScheduler", "LearningRateWarmup", "ReduceLROnPlateau")
_MAY_VARY, _WHOSE = " (may vary)", ("in the checkpoint", "now")
_CODE = re.compile(r" \(code [0-9a-f]+\)")
# Some checkpoints name the module that defines a class, which may move, and not the public one.
_DEFINES = re.compile(r"\btnt_jax\.keras_compat\.(\w+)(\.[a-z_0-9]+)*(?=\.)")
# How many calls of `fit` have trained with a directory in this job.
_fits = Slot[Counter[Path]](Counter, lasts=True)


def choose_directory(resume: Any, callbacks: Any) -> Path | None:
    """Returns the directory for the checkpoints of this call of `fit`, or None for none."""
    is_path = isinstance(resume, os.PathLike) or (isinstance(resume, str) and resume)
    if resume is not None and not is_path:
        raise ValueError(f"resume must be None, 'auto' or a directory, but is {resume!r}.")
    directory = os.environ.get(_DIR)
    if any(first_base(item, ["BackupAndRestore"]) for item in unwrapped(callbacks)):
        if resume is None:
            return None
        raise ValueError(
            f"fit was given resume={os.fspath(resume)!r} and a BackupAndRestore, which does the "
            "same. Leave one of them out."
        )
    if resume is None and not directory:
        storage, report = ray_storage(), _ray_report(callbacks)
        reports_metrics_alone = report is not None and report.save_freq is None
        if storage is None or reports_metrics_alone:
            return None
        base = storage.folder
    elif resume is None or resume == "auto":
        base = (Path(directory) if directory else Path("checkpoints", _script_name())).absolute()
    else:
        base = Path(resume).absolute()
    # So that each call of a script finds its own again.
    return base / f"fit-{_fits.get()[base] + 1}"


def count_fit(directory: Path | None) -> None:
    """Gives the next call of `fit` the next directory; one that fails before it trains does not."""
    if directory is not None:
        _fits.get()[directory.parent] += 1


def _ray_report(callbacks: Any) -> RayReport | None:
    return next((item for item in unwrapped(callbacks) if isinstance(item, RayReport)), None)


def with_backup(callbacks: Any, directory: Path | None) -> Any:
    """Returns callbacks with one that saves and resumes, and on Ray one that reports to it."""
    added: list[Any] = []
    report, storage = _ray_report(callbacks), ray_storage()
    if directory is not None:
        save_freq = read_settings({_EVERY: os.environ.get(_EVERY, "")}).checkpoint_every
        if report is not None and report.save_freq not in (None, "default"):
            save_freq = report.save_freq
        if storage is not None and directory.is_relative_to(storage.folder):
            added.append(backup_on_ray(directory, save_freq, storage))
        else:
            added.append(BackupAndRestore(directory, save_freq, delete_checkpoint=False))
    if report is None and storage is None:
        return [*flat(callbacks), *added] if added else callbacks
    # It reports what the others, and the backup, have done.
    others = [item for item in flat(callbacks) if getattr(item, "callback", item) is not report]
    return [*others, *added, report or RayReport()]


def _script_name() -> str:
    """Returns the name of the running script, or of the package that runs as one."""
    script = Path(sys.argv[0])
    if script.suffix != ".py":
        return script.name if script.name not in ("", "-c") else "interactive"
    return script.parent.name if script.name == "__main__.py" else script.stem


# What a run is, by group and name; the groups are `CHANGES`, "seed" and "versions".
Run = dict[str, dict[str, str]]


def describe_run(core: Core, plan: Plan, callbacks: Sequence[Any]) -> Run:
    """Returns what a run is, as far as it decides the result; JSON values without addresses."""
    chosen = describe_compilation(core, core.require_compiled())
    chosen |= flat_settings("class_weight", comparable(plan.arguments.class_weight))
    options = {name: comparable(getattr(core.options, name)) for name in _OPTIONS}
    if core.options.sync is None:
        del options["sync"]  # As in backups of versions that have no such option.
    rates = [item for item in callbacks if type(item).__name__ in RATE_CALLBACKS]
    groups: Run = {name: {} for name in CHANGES}
    for name, value in chosen.items():
        if name.startswith("optimizer"):
            group = "learning_rate" if "learning_rate" in name else "optimizer"
        else:
            group = "loss" if name.startswith(_LOSS) else "metrics"
        groups[group][name] = value
    groups["model"] = flat_settings("Model", options) | describe_model(core)
    groups["learning_rate"] |= _rates(core) | describe_callbacks(rates)
    groups["data"] = _describe_data(plan)
    size = plan.stream.source.global_batch_size
    ranks = core.trainer.rank_slice.num_ranks
    groups["batch_size"] = {"rows of a global batch": str(size), "ranks": str(ranks)}
    groups["seed"] = {"Model.seed": str(core.options.seed)}
    return groups | {"versions": installed_versions()}


def _rates(core: Core) -> dict[str, str]:
    """Returns a few values of a schedule that is a function, which does not tell its settings."""
    optimizer = core.require_compiled().optimizer
    schedule = optimizer.learning_rate
    if not callable(schedule) or hasattr(schedule, "get_config"):
        return {}
    values = [f"{float(optimizer.rate_at(np.int32(step))):.5g}" for step in _RATE_STEPS]
    return {f"learning rate at steps {', '.join(map(str, _RATE_STEPS))}": ", ".join(values)}


def _describe_data(plan: Plan) -> dict[str, str]:
    """Returns what the data tells of itself, with checksums of the first rows of process 0."""
    source, order = plan.stream.source, row_order_of(plan.stream.source)
    leaves = jax.tree.leaves(plan.first.data)
    form = ", ".join(f"{np.asarray(x).dtype}{list(np.shape(x)[1:])}" for x in leaves)
    told = {"kind of the data": type(source).__name__, "form of a row": form}
    if "number of shards" in order.parts:
        return told  # Each process has rows of its own, in an order that nobody knows.
    sizes = {"number of examples": source.num_examples} if source.in_memory else order.parts
    contents = {name: x for name, x in getattr(source, "order", {}).items() if "contents" in name}
    told |= {name: str(value) for name, value in (sizes | contents).items()}
    return told if contents else told | _first_rows(plan)


def _first_rows(plan: Plan) -> dict[str, str]:
    """Returns checksums of the first rows, by names that say whether they must stay the same."""
    first: HostBatch = plan.first
    num_rows = len(jax.tree.leaves(first.data)[0]) if first.mask is None else int(first.mask.sum())
    source = plan.stream.source
    # Of an iterable nobody knows whether its shuffle has a seed.
    hint = _MAY_VARY if hasattr(source, "first_checksums") else ""
    told = {}
    for rows in (rows for rows in _FIRST_ROWS if rows <= num_rows):
        inputs, targets, _ = unpack(jax.tree.map(lambda x, rows=rows: x[:rows], first.data))
        of = f"of the first {rows} rows of epoch {plan.arguments.initial_epoch + 1} (checksum)"
        told[f"targets {of}{hint}"] = f"{checksum_of(targets):08x}"
        told[f"inputs {of}{_MAY_VARY}"] = f"{checksum_of(inputs):08x}"
    return told


def differences(then: Run, now: Run, *, has_ended: bool) -> dict[str, str]:
    """Returns what differs between two runs in words, by group."""
    found = {}
    for group in (*CHANGES, "seed"):
        pair = [
            {
                name: _DEFINES.sub(r"tnt_jax.\1", text)
                for name, text in each.items()
                if not name.endswith(_MAY_VARY)
            }
            for each in _comparable_pair(group, then, now)
        ]
        # At the end of a run, another global batch would have no effect.
        if group == "batch_size" and not (has_ended and _is_rebatched(*pair)):
            continue
        kind = f"{group}.class"
        if pair[0].get(kind) != pair[1].get(kind):
            # Of another class, all other settings are others, too.
            pair = [{kind: each.get(kind, "")} for each in pair]
        if text := describe_differences(pair, whose=_WHOSE):
            found[group] = text
    return found


def _comparable_pair(group: str, then: Run, now: Run) -> tuple[dict[str, str], dict[str, str]]:
    before, after = then.get(group, {}), now[group]
    if group != "data" and then.get("versions") == now["versions"]:
        return before, after
    # Another version of a library may have other settings, Flax another graph, Python other code.
    common = [name for name in after if name in before and name != "model.graph"]
    return (
        {name: _CODE.sub("", before[name]) for name in common},
        {name: _CODE.sub("", after[name]) for name in common},
    )


def _is_rebatched(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Returns whether the global batch has changed by more than the number of ranks explains."""
    (size, ranks), (new_size, new_ranks) = before.values(), after.values()
    if "None" in (size, new_size):
        return False
    per_rank = int(size) * int(new_ranks) == int(new_size) * int(ranks)
    return size != new_size and not (per_rank and ranks != new_ranks)


def _refusal(found: Mapping[str, str], where: str) -> str:
    text = f"{where} holds another run: {'; '.join(found.values())}. For a new run, choose another "
    text += "directory."
    if "seed" in found:
        return f"{text} The seed of a run cannot change."
    return (
        f"{text} To continue this one with the change, pass tnt_ignore_changes={[*found]} to fit."
    )


def check_changes(ignored: Any) -> tuple[str, ...]:
    """Returns the argument `tnt_ignore_changes` of `fit` as a tuple."""
    names = (ignored,) if isinstance(ignored, str) else tuple(ignored)
    if unknown := [name for name in names if name not in CHANGES]:
        raise ValueError(
            f"tnt_ignore_changes may name {', '.join(CHANGES)}, but names {unknown[0]!r}."
        )
    return names


class Reached(NamedTuple):
    """Where training is, between two steps."""

    position: Position
    data: DataPosition  # The same in rows, and what that depends on; JSON values.
    sums: list[Any]  # Leaves, on the devices.


class Resumption:
    """The starting point of the running `fit` according to callbacks, and where training is."""

    def __init__(self, core: Core, progress: Progress) -> None:
        self._core = core
        self._progress = progress
        # Keras's BackupAndRestore sets the epoch that replaces the argument of `fit`.
        self.initial_epoch: int | None = None
        # Saves the running `fit` where it is, and returns whether that is written; set by
        # `BackupAndRestore` while it is active. All processes call it between the same two steps,
        # or outside of the steps.
        self.save_now: Callable[[], bool] | None = None
        self._stream: EpochStream | None = None
        self._first_epoch = 0
        self._resumed: Place | None = None
        self.run: Run | None = None
        self._ignored: Collection[str] = ()

    def describe_run(self, plan: Plan, callbacks: Sequence[Any]) -> None:
        """Notes what the running `fit` is, for its backups, before callbacks change anything."""
        is_asked = any(first_base(item, ["BackupAndRestore", "Track"]) for item in callbacks)
        is_told = is_asked or link() is not None
        self.run = describe_run(self._core, plan, callbacks) if is_told else None
        self._ignored = plan.arguments.ignored_changes

    def compare_run(
        self, noted: Run | None, where: str, *, has_ended: bool, alone: bool
    ) -> dict[str, str]:
        """Returns what differs from the run of a checkpoint; what is not allowed is an error."""
        assert self.run is not None, "describe_run() comes first."
        if noted is None:
            logger.warning(
                "The checkpoint in %s does not say which model, optimizer and data it belongs to, "
                "so it cannot be compared with this run.",
                where,
            )
            return {}
        found = differences(noted, self.run, has_ended=has_ended)
        before, after = _comparable_pair("data", noted, self.run)
        varying = any(before[name] != after[name] for name in after if name.endswith(_MAY_VARY))
        if not alone:
            found, varying = collectives.agree("Model.fit", {}, note=[found, varying])[0]
        if refused := [group for group in found if group not in self._ignored]:
            raise ValueError(_refusal({group: found[group] for group in refused}, where))
        if varying:
            logger.warning(
                "The first rows of the data differ from those of the run in %s: other data, or a "
                "shuffle or augmentation without a seed.",
                where,
            )
        return found

    def begin(self, stream: EpochStream, first_epoch: int) -> None:
        """Forgets an earlier `fit`."""
        self._stream, self._first_epoch = stream, first_epoch
        self.save_now = self._resumed = None
        self._progress.place = Place(first_epoch)

    def reached(self) -> Reached:
        """Returns where training is; all of the steps that were started belong to it."""
        place = self._progress.place
        assert self._stream is not None, "fit() comes first."
        return Reached(
            Position(place.epoch, place.batch),
            describe_position(self._stream, self._first_epoch, place.rows),
            jax.tree.leaves(place.sums),
        )

    def resume_at(self, position: Position, data: DataPosition, sums: list[np.ndarray]) -> Position:
        """Makes `fit` begin at a position, in `on_train_begin`; returns it in its own batches."""
        assert self._stream is not None, "fit() comes first."
        num_steps = int(self._core.trainer.require_state().step)
        is_accumulating = num_steps % self._core.require_compiled().accumulation_steps > 0
        batch = batches_done(
            position, data, self._stream, self._first_epoch, is_accumulating=is_accumulating
        )
        self._resumed = Place(position.epoch, batch, data["rows"], sums)
        return Position(position.epoch, batch)

    def enter_epoch(self, epoch: int) -> None:
        """Says that training is before the first step of an epoch."""
        functions, sums = self._core.functions, self._progress.place.sums
        kept = None
        if isinstance(functions, Compiled) and sums is not None:
            kept = functions.kept(sums)
        self._progress.place = Place(epoch, sums=kept)

    def warn_unless_repeatable(self) -> None:
        """Warns if the data of the running `fit` cannot be read again from its beginning."""
        assert self._stream is not None, "fit() comes first."
        order = row_order_of(self._stream.source)
        if order.unrepeatable:
            logger.warning(
                "A run that stops within an epoch could not be resumed there. %s.",
                order.unrepeatable,
            )
        if not order.can_go_back:
            logger.warning(
                "The data is a generator, which cannot go back: a resumed run makes its batches "
                "from the first on and drops those that are done, which is right only if it makes "
                "the same ones in every run. Pass arrays, a tf.data.Dataset, a "
                "tnt_jax.data.RandomAccess, or an object whose __iter__ starts anew."
            )

    def adopt_master_state(self) -> None:
        """Replaces the training state and the first epoch by the master's, on every process."""
        trainer = self._core.trainer
        state = replace(trainer.gathered_state(), accumulated=None, residual=None)
        arrays = {path: np.asarray(leaf) for path, leaf in state_arrays(state).items()}
        trainer.set_state(with_arrays(trainer.require_state(), collectives.broadcast(arrays)))
        epoch = -1 if self.initial_epoch is None else self.initial_epoch
        epoch = int(collectives.broadcast(np.int64(epoch)))
        self.initial_epoch = None if epoch < 0 else epoch

    def take(self, initial_epoch: int, first: Batch) -> Place:
        """Returns where `fit` begins."""
        resumed, self._resumed = self._resumed, None
        epoch, self.initial_epoch = self.initial_epoch or initial_epoch, None
        if resumed is None:
            return Place(epoch)
        if not resumed.sums:
            return resumed._replace(sums=None)
        trainer = self._core.trainer.of_group
        try:
            return resumed._replace(sums=trainer.host_sums(trainer.own_rows(resumed.sums), first))
        except ValueError as error:
            raise ValueError(
                f"The metrics cannot change within an epoch, and the checkpoint is within epoch "
                f"{resumed.epoch + 1}: compile with those of the interrupted run."
            ) from error


@contextmanager
def ending_on_request(callbacks: Sequence[Any]) -> Iterator[Points]:
    """Yields the points at which `fit` may end: with a callback that saves, on a signal."""
    if role() is not None:
        # Ray trains in a thread, which gets no signals, and ends its processes by itself.
        yield Points()
        return
    backups = [item for item in callbacks if isinstance(item, BackupAndRestore)]
    watch = stopping.start() if backups else None
    if watch is None or watch.is_training:
        yield Points()
        return
    watch.is_training = True
    watch.take_signals()
    try:
        yield watch
    finally:
        watch.is_training = False
        if all(backup.delete_checkpoint for backup in backups):
            watch.leave_signals()


@contextmanager
def releasing(callbacks: Sequence[Any]) -> Iterator[None]:
    """Lets others write to the directories of backups if an exception ends the block."""
    try:
        yield
    except BaseException:
        # With several processes, it ends this one, for whose part of a backup others may wait.
        if jax.process_count() == 1:
            for backup in callbacks:
                if isinstance(backup, BackupAndRestore):
                    backup.release()
        raise


def save_and_exit(
    save: Callable[[], bool] | None,
    callbacks: CallbackList,
    progress: Progress,
    logs: Mapping[str, float],
) -> NoReturn:
    """Saves the state, ends the callbacks, and ends the process; all processes call it together."""
    assert save is not None, "Without a callback that saves, nobody is asked to end."
    watch = stopping.current()
    assert watch is not None
    place = f"after step {progress.place.batch} of epoch {progress.place.epoch + 1}"
    if save():
        code = PREEMPTED_EXIT_CODE
        logger.warning(
            "%s: the state %s is saved. Ending with exit code %d; the same command goes on from "
            "there.",
            watch.reason,
            place,
            code,
        )
    else:
        code = 128 + watch.signum
        logger.error(
            "%s: the state %s could not be saved. Ending with exit code %d; the same command goes "
            "on from the checkpoint before.",
            watch.reason,
            place,
            code,
        )
    callbacks.call("on_train_end", logs)
    stopping.leave(code)

"""A search of settings with a server: trials, their report, and the change of `config.pbtxt`."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from shutil import get_terminal_size
from string import ascii_letters
from threading import Event

from google.protobuf import json_format

from headrace.api.operations import Document
from headrace.cli.commands.infer_inputs import read_inputs
from headrace.cli.files import replace_file
from headrace.cli.remote import CommandFailed
from headrace.cli.text import duration, fitted_table, number, printable, progress_bar, styled
from headrace.client import ClientError, StatusError
from headrace.client.blocking import Client
from headrace.client.transport import InferRequest
from headrace.core.errors import InvalidConfig
from headrace.placement.cores import core_share
from headrace.plugins.explain.commands.loading import measure
from headrace.plugins.explain.commands.plot import BEST, TARGET, as_svg, as_text
from headrace.plugins.explain.config_text import changed, policy_in, rewritten, settings_in
from headrace.plugins.explain.searching import (
    ClientLevel,
    SettingsSearch,
    SettingsTrial,
    TunedSettings,
    best_level,
    candidates,
    keeps,
    poisson,
)
from headrace.protocol.pb.model_config_pb2 import ModelConfig, ModelInstanceGroup
from headrace.scheduling.policy import BatchPolicy

_BUSY = 0.8  # share of a core that the clients use: with more, they may be the limit
_LEFT = 0.9  # of a trial's progress, by each of its levels: how many there are is not known
_STYLES = {BEST: "bold green", TARGET: "red"}
_RIGHT = "CLIENTS RATE REQ/S P50 P99"


class Tuning:
    """The search for the settings of one model of a server."""

    def __init__(self, options: argparse.Namespace, server: Client) -> None:
        """Ask the server about the model; raises `ClientError` and `CommandFailed`."""
        self._options, self._server, self._model = options, server, options.model
        self._original = server.model_config(self._model)
        self._config = ModelConfig()
        json_format.ParseDict(self._original, self._config, ignore_unknown_fields=True)
        self._overridden = False
        try:
            present = settings_in(self._config)
        except InvalidConfig as error:
            raise CommandFailed(f"model '{self._model}' cannot be tuned: {error}") from None
        self._present = present
        self._request, rows = self._make_request(present)
        cores, group = core_share(), self._config.instance_group[0]
        on_cpu = group.kind == ModelInstanceGroup.KIND_CPU
        threads = cores if self._config.backend == "onnxruntime" and on_cpu else 0
        levels = [2**power for power in range(options.clients.bit_length())]
        arrivals: tuple[int, ...] = ()
        if options.rate:
            levels, arrivals = [0], self._arrivals(options.rate)
        found = candidates(present, rows, options.p99, options.instances or cores, threads)
        self.search = SettingsSearch(
            options.p99, self._policy_of, rows, levels, list(found), arrivals=arrivals
        )

    def _arrivals(self, rate: float) -> tuple[int, ...]:
        return poisson(rate, self._options.seconds, self._options.seed)

    def _policy_of(self, settings: TunedSettings) -> BatchPolicy:
        return policy_in(changed(self._config, self._present, settings))

    def _make_request(self, present: TunedSettings) -> tuple[InferRequest, int]:
        """The request of all trials, with its rows."""
        options, known = self._options, self._server.signature(self._model)
        given = argparse.Namespace(
            model=self._model, data=options.input, input=[], random=options.input is None,
            rows=options.rows, seed=options.seed, format="", layout="", scale=None, mean=(0.0,),
            std=(1.0,),
        )  # fmt: skip
        tensors = self._server.tensors(self._model, read_inputs(given, known))
        rows = 1
        if present.max_batch_size and tensors:
            rows = tensors[0].array.shape[0]
        if rows > max(present.max_batch_size, 1):
            raise CommandFailed(
                f"a request has {rows} rows, and the model takes {present.max_batch_size}"
            )
        return InferRequest(self._model, tensors, list(known.outputs)), rows

    def run(self) -> None:
        """Try settings until none promises more; raises `CommandFailed` if the present ones fail.

        An interrupt leaves the trials so far.
        """
        progress = _TrialProgress(self._options.trials)
        try:
            wanted: TunedSettings | None = self._present
            while wanted is not None and len(self.search.trials) < self._options.trials:
                self.search.add(self._try(wanted, progress))
                progress.end(": ".join(self._told(self.search.trials[-1])))
                wanted = self.search.next()
        finally:
            progress.close()

    def _try(self, wanted: TunedSettings, progress: "_TrialProgress") -> SettingsTrial:
        """Load settings, and measure them; the present ones, too, so that a refusal ends all."""
        levels, batches, pause_ns = list[ClientLevel](), list[tuple[int, int]](), 0
        try:
            self._overridden = True
            self._load(changed(self._config, self._present, wanted))
            self._explain()  # the log of batches begins
            while (load := self.search.next_load(levels)) is not None:
                clients, rate = load
                of = number(rate or self._options.rate)
                told = f"{clients} clients" if clients else f"{of} requests/s"
                progress.tell(f"{self._name(wanted)}, {told}", 1 - _LEFT ** len(levels))
                levels.append(self._measure(clients, rate))
                found = self._explain()
                if not found["last_batches"]:
                    why = found["obstacle"]
                    raise CommandFailed(f"model '{self._model}' cannot be tuned: {why}")
                if not batches:
                    pause_ns = max(levels[0].mean_ns - found["logged"]["mean_ns"], 0)
                batches += [_batch(each) for each in found["last_batches"]]
        except ClientError as error:
            if wanted == self._present and not levels:
                raise
            if not levels:
                return SettingsTrial(wanted, (), error=str(error))
        return SettingsTrial(wanted, levels, batches, pause_ns)

    def _measure(self, clients: int, rate: float) -> ClientLevel:
        stopped, begun = Event(), None
        load = partial(
            measure, request=self._request, clients=clients, seconds=self._options.seconds,
            stopped=stopped,
            arrivals=self._arrivals(rate) if rate else self.search.arrivals,
        )  # fmt: skip
        try:
            begun = self._server.begin(load)
            return begun.result()._replace(rate=rate)
        except KeyboardInterrupt:
            stopped.set()  # it may come while it begins
            if begun is not None:
                begun.cancel()
            raise

    def _explain(self) -> Document:
        return self._server.document("ModelExplain", name=self._model, version="")

    def _load(self, config: ModelConfig) -> None:
        text = json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None)
        self._server.load(self._model, text)

    def restore(self) -> None:
        """Load the model as it was: from the repository, or with the override that it had."""
        if self._overridden:
            with suppress(StatusError):  # of a server that loads nothing, and has not before
                self._server.load(self._model)
            if self._server.model_config(self._model) != self._original:
                self._server.load(self._model, json.dumps(self._original))

    @property
    def kept(self) -> bool:
        """True if the best settings keep the target."""
        best = self.search.best()
        return best is not None and keeps(self._best(best), self._options.p99)

    def write(self, path: Path) -> str:
        """Write the best settings into a `config.pbtxt`, which may be new; "" if none differs."""
        best = self.search.best()
        if best is None or best.settings == self._present:
            return ""
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            new = rewritten(text, str(path), self._present, best.settings)
            replace_file(path, new.encode())
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailed(f"{path}: cannot be changed: {error}") from None
        except InvalidConfig as error:
            raise CommandFailed(str(error)) from None
        return str(path)

    def document(self) -> Document:
        """The trials and the best one; times in nanoseconds."""
        best = self.search.best()
        return {
            "model": self._model, "p99_target_ns": self._options.p99, "rows": self.search.rows,
            "rate": self._options.rate or None, "kept": self.kept,
            "best": best and best.settings._asdict(),
            "trials": [
                {
                    "settings": trial.settings._asdict(),
                    "change": trial.settings.changes(self._present),
                    "levels": [level._asdict() for level in trial.levels],
                    "best": self._best(trial)._asdict() if trial.levels else None,
                    "error": trial.error,
                }
                for trial in self.search.trials
            ],
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """The trials as a table and a plot, and the best one in words."""
        trials, best = self.search.trials, self.search.best()
        done = [*zip((each for each in trials if each.levels), cycle(ascii_letters))]
        rows = [(letter, *self._row(each)) for each, letter in done]
        load = "CLIENTS" if self.search.levels else "RATE"
        heads = ("", "SETTINGS", load, "REQ/S", "P50", "P99", "KEPT")
        yield from fitted_table(heads, rows, _RIGHT)
        yield from (": ".join(self._told(each)) for each in trials if each.error)
        yield ""
        if best is None:
            yield "nothing was measured"
            return
        found, name = self._best(best), self._name(best.settings)
        curves = [(letter, each.levels) for each, letter in done]
        plot = as_text(curves, found, self._options.p99, get_terminal_size().columns)
        yield from styled(plot, _STYLES)
        yield ""
        if self.kept:
            first, more = self._best(trials[0]), ""
            if best is not trials[0] and (found.clients or found.rate):
                times = (found.rate or found.per_second) / (first.rate or first.per_second)
                more = f", {times:.2f} times as many"
            elif best is not trials[0]:
                p99, before = (duration(each.p99_ns / 1e9) for each in (found, first))
                more = f", p99 {p99} instead of {before}"
            yield f"best: {name}: {self._rate(found)}{more}"
        else:
            target, nearest = (duration(ns / 1e9) for ns in (self._options.p99, found.p99_ns))
            yield f"nothing keeps a p99 of {target}; the nearest is {name} with {nearest}"
        if found.busy > _BUSY:
            yield f"the clients used {found.busy:.0%} of a core: they may have been the limit"

    def plot(self) -> str:
        """The trials as a picture."""
        done = [trial for trial in self.search.trials if trial.levels]
        curves = {self._name(trial.settings): trial.levels for trial in done}
        return as_svg(self._model, curves, self._options.p99)

    def _best(self, trial: SettingsTrial) -> ClientLevel:
        return best_level(trial.levels, self._options.p99)

    def _name(self, settings: TunedSettings) -> str:
        changes = settings.changes(self._present)
        return ", ".join(f"{name}: {value}" for name, value in changes.items()) or "as it is"

    def _told(self, trial: SettingsTrial) -> tuple[str, str]:
        if not trial.levels:
            return self._name(trial.settings), printable(trial.error)
        level = self._best(trial)
        p99 = duration(level.p99_ns / 1e9)
        return self._name(trial.settings), f"{self._rate(level)}, p99 {p99}"

    def _rate(self, level: ClientLevel) -> str:
        if level.rate:
            return f"{number(level.rate)} requests/s"
        of = f"with {level.clients} clients" if level.clients else f"of {self._options.rate}"
        return f"{number(level.per_second)} requests/s {of}"

    def _row(self, trial: SettingsTrial) -> tuple[str, ...]:
        level = self._best(trial)
        load = level.clients if self.search.levels else level.rate
        return (
            self._name(trial.settings), number(load or None), number(level.per_second),
            duration(level.p50_ns / 1e9), duration(level.p99_ns / 1e9),
            "yes" if keeps(level, self._options.p99) else "no",
        )  # fmt: skip


class _TrialProgress:
    """The progress of a search on standard error: a bar on a terminal with rich, else lines."""

    def __init__(self, trials: int) -> None:
        self._bar, self._done = progress_bar(), 0.0
        if self._bar is not None:
            self._task = self._bar.add_task("", total=trials, told="")
            self._bar.start()

    def tell(self, text: str, share: float) -> None:
        """Show what is measured: the settings, of whose trial a `share` is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done + share, told=text)

    def end(self, text: str) -> None:
        """Go on by a trial; without a bar, print its result."""
        self._done += 1
        if self._bar is None:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def _batch(found: Document) -> tuple[int, int]:
    """Rows and nanoseconds of a batch of an explanation."""
    return found["rows"], found["gather_ns"] + found["run_ns"] + found["rest_ns"]

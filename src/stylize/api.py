"""Paint from Python: `stylize(content, style)` for one picture, a `Stylizer` for many.

Nothing in here prints, exits, or changes torch's or Pillow's global state.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import PIL.Image
import torch
import torch.nn.functional as F
from torch import Tensor

from stylize import __version__, images
from stylize.batch.engines import Paint, Painted
from stylize.batch.manifest import file_hash
from stylize.batch.plan import Job, make_plan
from stylize.batch.report import BatchListener, BatchReport
from stylize.batch.run import Choice, run_folder
from stylize.errors import OutputError, RunError, SaveError, SettingsError
from stylize.events import Evaluated, Event, Listener, Notice, ignore
from stylize.images import Source
from stylize.inspect.record import Wiring, check_log_dir, wired
from stylize.nst.device import choose_device, choose_dtype
from stylize.nst.hooks import GradientHook
from stylize.nst.optimize import Outcome
from stylize.nst.transfer import Painting, Style, scale_sizes, target_size, transfer
from stylize.nst.vgg import Vgg19, load_weights, minimum_size
from stylize.settings import Settings

Config: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"
NAMED_STARTS = ("content", "noise", "style")  # what `Settings.init` can be besides a path


@dataclass(frozen=True)
class Result:
    """A painted picture and how it came to be.

    `outcome` is "done"; or "interrupted", after a KeyboardInterrupt during the run; or "failed", when the run
    could not go on (`reason` says why). In each case the picture is the best one that the run saw.
    """

    tensor: Tensor  # [1, 3, H, W] float32, sRGB in [0, 1], on the CPU
    alpha: Tensor | None  # [1, 1, H, W] float32 in [0, 1]: the content's transparency; None when it is opaque
    losses: Mapping[str, float]  # unweighted, at the result: total, content, style, tv, range, style.LAYER
    history: tuple[Evaluated, ...]
    evaluations: int
    seconds: float  # for the optimisation
    settings: Settings
    outcome: Outcome
    reason: str  # why the run ended: a sentence
    notices: tuple[str, ...]  # what the user should know
    record: Mapping[str, Any]  # what a saved file tells of itself; the same for every run of the same choices
    path: Path | None = None  # where it was saved

    @property
    def image(self) -> PIL.Image.Image:
        """The picture with 8 bits a channel; RGBA when the content is transparent somewhere."""
        return images.to_pil(self.tensor, self.alpha)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the picture, with `record` inside; the extension chooses the format.

        Raises:
            OutputError: when the path cannot be written, or exists and `overwrite` is false.
            SaveError: when writing fails.
        """
        return images.save_picture(
            self.tensor, path, record=self.record, alpha=self.alpha, overwrite=overwrite
        )


class UnsavedError(SaveError):
    """The picture is painted but could not be written; `result` holds it, to be saved elsewhere."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result


def stylize(
    content: Source,
    style: Source | Sequence[Source],
    *,
    out: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    config: Config | None = None,
    overwrite: bool = False,
    init: Source | None = None,
    on_event: Listener = ignore,
    snapshot_every: int | None = None,
    gradient_hooks: Sequence[GradientHook] = (),
    max_pixels: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> Result:
    """Paint `content` in the manner of `style`.

    Args:
        content: a path, a PIL image, or a float tensor or array [3, H, W] or [1, 3, H, W] in [0, 1].
        style: the same, or several, which are blended by the setting `style_weights`.
        out: where to save the result.
        settings: all choices at once, or
        config: a preset's name, a TOML file, a former result (a picture), or a mapping of settings.
        overwrite: may `out` be replaced?
        init: what to start from: "content", "noise", "style", or a picture.
        on_event: called with every event of `stylize.events`, in this thread; what it raises ends the run.
        snapshot_every: evaluations between two `Snapshot` events.
        gradient_hooks: called with the gradient on the picture, [1, 3, H, W], at every evaluation.
        max_pixels: refuse to read larger pictures; None is Pillow's own limit.
        log_dir: a folder for the record of the run: trace.jsonl, and events for TensorBoard.
        overrides: single settings, on top of `settings` or `config`.

    Raises:
        RefusedError: before anything is computed: a setting, a picture, the weights or `out`.
        UnsavedError: when the picture is painted but cannot be written; it is in the error's `result`.
        RunError: when nothing finite came out, or memory was too short for a first evaluation.
        KeyboardInterrupt: when it came before anything was painted, or a second time.
    """
    if settings is not None and config is not None:
        raise SettingsError("Give settings or config, not both.")
    chosen = settings.replace(**overrides) if settings is not None else load_settings(config, **overrides)
    return Stylizer(chosen)(
        content,
        style,
        out=out,
        overwrite=overwrite,
        init=init,
        on_event=on_event,
        snapshot_every=snapshot_every,
        gradient_hooks=gradient_hooks,
        max_pixels=max_pixels,
        log_dir=log_dir,
    )


def stylize_folder(
    content: str | os.PathLike[str],
    style: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] = "outputs",
    *,
    settings: Settings | None = None,
    config: Config | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    suffix: str = ".png",
    overwrite: bool = False,
    dry_run: bool = False,
    retry_failed: bool = False,
    fail_fast: bool = False,
    shard: tuple[int, int] | None = None,
    engine: str = "auto",
    workers: int | None = None,
    threads: int | None = None,
    ray_address: str | None = None,
    max_pixels: int | None = None,
    on_event: BatchListener = lambda event: None,
    stop: threading.Event | None = None,
    **overrides: Any,
) -> BatchReport:
    """Paint every picture in a folder; what an earlier run over it has done is not done again.

    What is done stands in `out`/.stylize, and the report in `out`/report.json. Ctrl-C ends the run at once,
    and the report is returned all the same.

    Args:
        content: the folder, with its subfolders; or one picture, for a folder of styles.
        style: one picture, or several that are blended, or a folder of which each is used in turn.
        out: the output folder, in which the tree of `content` is mirrored.
        settings: all choices at once, or
        config: a preset's name, a TOML file, a former result, or a mapping of settings.
        include: patterns as "*.jpg" or "holiday/*"; without any, all pictures are painted.
        exclude: patterns of what is left out.
        suffix: of the outputs, which is their format: .png, .jpg, .webp or .tiff.
        overwrite: may files in `out` be replaced that no earlier run over it has made?
        dry_run: find out what would be done, and what it would cost.
        retry_failed: paint again what failed before.
        fail_fast: end the run at the first picture that fails.
        shard: (i, n) paints part i of n, counted from 1, beside other processes that paint theirs.
        engine: "processes" (what "auto" means), "inline", or "ray".
        workers: processes or actors; None = what suits the machine.
        threads: of each of them; None = what suits the machine. Another number may give other bytes.
        ray_address: of a Ray cluster, such as "auto".
        max_pixels: refuse to read larger pictures; None is Pillow's own limit.
        on_event: called with every event of `stylize.batch.report`, in this thread.
        stop: once it is set, pictures that are being painted are finished, and no other is begun.
        overrides: single settings, on top of `settings` or `config`.

    Raises:
        RefusedError: before anything is computed: a setting, a style, the folders, or another run at work there.
    """
    if settings is not None and config is not None:
        raise SettingsError("Give settings or config, not both.")
    chosen = settings.replace(**overrides) if settings is not None else load_settings(config, **overrides)
    styles = [style] if isinstance(style, (str, os.PathLike)) else list(style)
    plan = make_plan(
        Path(content),
        [Path(each) for each in styles],
        Path(out),
        include=[include] if isinstance(include, str) else include,  # else each letter is a pattern
        exclude=[exclude] if isinstance(exclude, str) else exclude,
        suffix=suffix,
    )
    for group in dict.fromkeys(job.styles for job in plan.jobs):
        _check_style_count(len(group), chosen)
        for each in group:
            _read(each, max_pixels)  # a style that cannot be read would fail every picture
    if chosen.init not in NAMED_STARTS:
        _read(chosen.init, max_pixels)  # and so would such a start
    choice = Choice(
        shard=shard,
        overwrite=overwrite,
        retry_failed=retry_failed,
        fail_fast=fail_fast,
        dry_run=dry_run,
        engine=engine,
        workers=workers,
        threads=threads,
        ray_address=ray_address,
        max_pixels=max_pixels,
    )
    painter = functools.partial(_open_painter, chosen, max_pixels)
    return run_folder(plan, chosen, painter, choice, on_event, stop or threading.Event())


def _open_painter(settings: Settings, max_pixels: int | None) -> Paint:
    """What paints the pictures of a folder, wherever it runs."""
    stylizer = Stylizer(settings)

    def paint(job: Job, listen: Listener) -> Painted:
        result = stylizer(job.content, job.styles, on_event=listen, max_pixels=max_pixels)
        if result.outcome == "interrupted":
            raise KeyboardInterrupt
        if result.outcome == "failed":
            raise RunError(f"{job.content}: {result.reason}")
        path = result.save(job.out, overwrite=True)
        return Painted(
            content_sha256=result.record["content"]["sha256"],
            output_sha256=file_hash(path),
            size=(result.tensor.shape[3], result.tensor.shape[2]),
            seconds=result.seconds,
            evaluations=result.evaluations,
            threads=torch.get_num_threads(),
            losses=result.losses,
            notices=result.notices,
        )

    return paint


def load_settings(config: Config | None = None, **overrides: Any) -> Settings:
    """Defaults < `config` < `overrides`; `config` may also be a picture that this program has painted.

    Raises:
        SettingsError: for an unknown name, a value that cannot be, or a config that is not there.
        PictureError: for a picture without settings inside.
    """
    if config is None or isinstance(config, Mapping):
        return Settings.from_sources(config, **overrides)
    path = Path(config)
    if path.suffix.lower() not in images.WRITE_FORMATS:
        return Settings.from_sources(str(config), **overrides)
    return Settings.from_sources(images.read_settings(path), **overrides)


class Stylizer:
    """Paints with one set of choices; keeps the network and what it measured of the styles between calls.

    It may be called from several threads: they take turns at the network. With `show_download` torch draws a bar
    on standard error while it fetches weights, if it must.
    """

    def __init__(self, settings: Settings | None = None, *, show_download: bool = False) -> None:
        self.settings = settings or Settings()
        self._show_download = show_download
        self._weights: Mapping[str, str] = {}  # their name and hash, once they are loaded
        self._network: Vgg19 | None = None
        self._style: tuple[list[str], Style] | None = None  # the latest, by its pictures' hashes
        self._lock = threading.Lock()  # the hooks on the network belong to one run

    def __call__(
        self,
        content: Source,
        style: Source | Sequence[Source],
        *,
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        init: Source | None = None,
        on_event: Listener = ignore,
        snapshot_every: int | None = None,
        gradient_hooks: Sequence[GradientHook] = (),
        max_pixels: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> Result:
        """Paint one picture; arguments, result and errors are those of `stylize.stylize`."""
        job = _prepare(self.settings, content, style, init, max_pixels)
        if out is not None:
            images.check_output(out, overwrite=overwrite, size=job.size)
            _check_spares_inputs(Path(out), job)
        if log_dir is not None:
            check_log_dir(log_dir)
        listen = _Collector(on_event)
        for notice in job.notices:
            listen(Notice(notice))
        wiring = Wiring(listen, snapshot_every, tuple(gradient_hooks))
        with self._lock:
            network = self._load_network()  # first: what is refused leaves no record of a run behind
            with wired(wiring, log_dir, job.settings) as wiring:
                painting = transfer(
                    network,
                    job.content.picture.tensor,
                    self._load_style(network, job.styles),
                    job.settings,
                    init=None if job.init is None else job.init.picture.tensor,
                    listen=wiring.listen,
                    snapshot_every=wiring.snapshot_every,
                    gradient_hooks=wiring.gradient_hooks,
                )
        result = _result(job, painting, self._weights, tuple(listen.notices))
        return result if out is None else _saved(result, out, overwrite)

    def _load_network(self) -> Vgg19:
        if self._network is None:
            settings = self.settings
            device = choose_device(settings.device)
            weights = load_weights(
                settings.weights, settings.weights_normalization, progress=self._show_download
            )
            self._weights = {"name": weights.name, "sha256": weights.sha256}
            self._network = Vgg19(
                weights,
                (*settings.content_layers, *settings.style_layers),
                pooling=settings.pooling,
                padding=settings.padding,
                dtype=choose_dtype(settings.precision, device),
            ).to(device)
        return self._network

    def _load_style(self, network: Vgg19, styles: Sequence[_Input]) -> Style:
        hashes = [style.identity["sha256"] for style in styles]
        if self._style is None or self._style[0] != hashes:
            pictures = [style.picture.tensor for style in styles]
            self._style = hashes, Style(network, pictures, self.settings)
        return self._style[1]


class _Collector:
    """Keeps the notices that pass by."""

    def __init__(self, listener: Listener) -> None:
        self.notices: list[str] = []
        self._listener = listener

    def __call__(self, event: Event) -> None:
        if isinstance(event, Notice):
            self.notices.append(event.text)
        self._listener(event)


@dataclass(frozen=True)
class _Input:
    """A picture that was handed in."""

    picture: images.Picture
    path: Path | None  # None when it was no file
    identity: Mapping[str, str]  # its name and the SHA-256 of its contents


@dataclass(frozen=True)
class _Job:
    """What one painting needs, read and checked."""

    settings: Settings
    content: _Input
    styles: tuple[_Input, ...]
    init: _Input | None
    size: tuple[int, int]  # width and height of the result in pixels

    @property
    def inputs(self) -> list[_Input]:
        """All pictures."""
        return [self.content, *self.styles, *([] if self.init is None else [self.init])]

    @property
    def notices(self) -> list[str]:
        """What was to be said about the pictures."""
        return [notice for each in self.inputs for notice in each.picture.notices]


def _prepare(
    settings: Settings,
    content: Source,
    style: Source | Sequence[Source],
    init: Source | None,
    max_pixels: int | None,
) -> _Job:
    """Read all pictures and refuse what can be refused before the weights are loaded."""
    choose_dtype(settings.precision, choose_device(settings.device))
    styles = list(style) if isinstance(style, Sequence) and not isinstance(style, str) else [style]
    _check_style_count(len(styles), settings)
    start = settings.init if init is None else init
    named = isinstance(start, str) and start in NAMED_STARTS
    read_start = None if named else _read(start, max_pixels)
    settings = settings.replace(init=start if read_start is None else read_start.picture.source)
    read_content = _read(content, max_pixels)
    least = minimum_size(settings.content_layers + settings.style_layers)
    scale_sizes(read_content.picture.tensor, settings, least)  # refuses what is too small
    return _Job(
        settings=settings,
        content=read_content,
        styles=tuple(_read(each, max_pixels) for each in styles),
        init=read_start,
        size=target_size(*read_content.picture.size, settings),
    )


def _check_spares_inputs(out: Path, job: _Job) -> None:
    """Not even `overwrite` means the originals."""
    if out.exists() and any(each.path is not None and out.samefile(each.path) for each in job.inputs):
        raise OutputError(f"{out} is one of the pictures to paint from. Choose another name.")


def _check_style_count(count: int, settings: Settings) -> None:
    if count == 0:
        raise SettingsError("There is no style picture; give at least one.")
    weights = settings.style_weights
    if weights is not None and len(weights) != count:
        raise SettingsError(
            f"style_weights has {len(weights)} values for {count} style pictures; give one for each."
        )


def _read(source: Source, max_pixels: int | None) -> _Input:
    picture = images.read_picture(source, max_pixels=max_pixels or images.DEFAULT_MAX_PIXELS)
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    contents = picture.tensor.contiguous().numpy().tobytes() if path is None else path.read_bytes()
    name = picture.source if path is None else path.name
    return _Input(picture, path, {"name": name, "sha256": hashlib.sha256(contents).hexdigest()})


def _result(job: _Job, painting: Painting, weights: Mapping[str, str], notices: tuple[str, ...]) -> Result:
    alpha = job.content.picture.alpha
    if alpha is not None:
        alpha = F.interpolate(alpha, painting.image.shape[-2:], mode="bilinear", antialias=True).clamp(0, 1)
    return Result(
        tensor=painting.image,
        alpha=alpha,
        losses=painting.losses,
        history=painting.history,
        evaluations=painting.evaluations,
        seconds=painting.seconds,
        settings=job.settings,
        outcome=painting.outcome,
        reason=painting.reason,
        notices=notices,
        record=_record(job, painting, weights),
    )


def _record(job: _Job, painting: Painting, weights: Mapping[str, str]) -> dict[str, Any]:
    """What goes into the file; nothing in it differs between two runs of the same command."""
    device = choose_device(job.settings.device)
    return {
        "program": "stylize",
        "version": __version__,
        "settings": job.settings.as_dict(),
        "content": job.content.identity,
        "styles": [style.identity for style in job.styles],
        "init": None if job.init is None else job.init.identity,
        "weights": weights,
        "device": device.type,
        "dtype": str(choose_dtype(job.settings.precision, device)).removeprefix("torch."),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "pillow")},
        },
        "outcome": painting.outcome,
        "evaluations": painting.evaluations,
        "losses": dict(painting.losses),
    }


def _saved(result: Result, out: str | os.PathLike[str], overwrite: bool) -> Result:
    """Save what was painted, if anything was; one Ctrl-C during it is obeyed only afterwards."""
    if result.evaluations == 0:
        return result
    try:
        try:
            path = result.save(out, overwrite=overwrite)
        except KeyboardInterrupt:
            if result.outcome == "interrupted":
                raise  # asked a second time
            reason = "Interrupted while the finished picture was being saved."
            result = dataclasses.replace(result, outcome="interrupted", reason=reason)
            path = result.save(out, overwrite=True)  # the first attempt may have written it
    except (SaveError, OutputError) as error:
        raise UnsavedError(str(error), result) from error
    return dataclasses.replace(result, path=path)

"""Paint from Python: `stylize(content, style)` for one picture, a `Stylizer` for many.

Nothing in here prints, exits, or changes torch's or Pillow's global state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import sys
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
from stylize.checkpoint import Checkpoint, check_folder, has_checkpoint
from stylize.errors import OutputError, PictureError, RunError, SaveError, SettingsError
from stylize.events import Evaluated, Event, Listener, Notice, ignore
from stylize.images import Source
from stylize.inspect.record import Wiring, check_log_dir, wired
from stylize.nst.color import keep_grey, showing_chroma, shown, shown_style, with_chroma
from stylize.nst.device import choose_device, choose_dtype
from stylize.nst.hooks import GradientHook
from stylize.nst.losses import additive_loss
from stylize.nst.memory import Plan, plan_memory
from stylize.nst.optimize import INTERRUPTED, Outcome, keep_nothing
from stylize.nst.ranks import ALONE, Ranks
from stylize.nst.regions import Division, Regions
from stylize.nst.transfer import Painting, Style, check_state, fit, resize, scale_sizes, target_size, transfer
from stylize.nst.vgg import Vgg19, load_weights, minimum_size
from stylize.regions import Region
from stylize.settings import NAMED_STARTS, Settings

CHECKED_SIDE = 1024  # px, long side, at which masks are looked at before the run
STRETCHED = 0.05  # of a mask's proportions to the picture's, as a share: more is said, less is rounding
ALPHA = "alpha"  # what `protect` can be besides a mask: where the content is transparent
Config: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"


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

    def __repr__(self) -> str:
        """One line; the pixels are in `tensor`."""
        height, width = self.tensor.shape[2:]
        return f"Result({width}×{height}, {self.outcome}, {self.evaluations} evaluations, {self.seconds:.1f} s)"

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
    content: Source | None,
    style: Source | Sequence[Source],
    *,
    out: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    config: Config | None = None,
    overwrite: bool = False,
    init: Source | None = None,
    regions: Sequence[Region] = (),
    protect: Source | None = None,
    on_event: Listener = ignore,
    snapshot_every: int | None = None,
    gradient_hooks: Sequence[GradientHook] = (),
    max_pixels: int | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> Result:
    """Paint `content` in the manner of `style`, or without content a texture of it.

    Args:
        content: a path, a PIL image, or a float tensor or array [3, H, W] or [1, 3, H, W] in [0, 1]; None for a
            texture, which starts from noise; the setting `size` is its (width, height), or the side of a square.
        style: the same, or several, which are blended by the setting `style_weights`, or each followed by layers
            of its own, by `style_layer_sources`; may be empty when there are regions: the rest stays as it is then.
        out: where to save the result.
        settings: all choices at once, or
        config: a preset's name, a TOML file, a former result (a picture), or a mapping of settings.
        overwrite: may `out` be replaced?
        init: what to start from: "content", "noise", "style", or a picture.
        regions: parts of the picture with styles of their own; `style` is that of the rest.
        protect: a mask, as a `Region` has, of what stays as it is in the content; "alpha": where it is transparent.
        on_event: called with every event of `stylize.events`, in this thread; what it raises ends the run.
        snapshot_every: evaluations between two `Snapshot` events.
        gradient_hooks: called with the gradient on the picture, [1, 3, H, W], at every evaluation.
        max_pixels: refuse to read larger pictures; None is Pillow's own limit.
        log_dir: a folder for the record of the run: trace.jsonl, and events for TensorBoard.
        checkpoint: a folder for the state of the run, from which the same call goes on if this one does not end.
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
        regions=regions,
        protect=protect,
        on_event=on_event,
        snapshot_every=snapshot_every,
        gradient_hooks=gradient_hooks,
        max_pixels=max_pixels,
        log_dir=log_dir,
        checkpoint=checkpoint,
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
    target_size(1, 1, chosen)  # refuses the size of a texture
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
            _read(each, max_pixels, _style_side(chosen))  # a style that cannot be read would fail every picture
    if chosen.init not in NAMED_STARTS:
        _read(chosen.init, max_pixels, _long_side(chosen))  # and so would such a start
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


def plan(
    content: str | os.PathLike[str] | None,
    settings: Settings | None = None,
    *,
    regions: int = 0,
    protect: bool = False,
) -> Plan:
    """What painting a picture takes in memory, and in how many pieces it is looked at; only its size is read.

    Args:
        content: a file; None for a texture.
        settings: all choices.
        regions: parts of the picture that have styles of their own.
        protect: does a part of it stay as it is?

    Raises:
        PictureError: when the file is no picture.
        InputError: when no plan fits into the memory.
    """
    settings = settings or Settings()
    parts = _parts(regions, protect)
    if content is None:
        return plan_memory(_size(None, settings), settings.replace(size="full"), regions=parts)
    width, height = images.probe_size(content)
    size = target_size(width, height, settings)
    source = 0 if size == (width, height) else 4 * 3 * width * height
    return plan_memory(size, settings, source_bytes=source, regions=parts)


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
    on standard error while it fetches weights, if it must. `ranks` are the processes that paint each picture
    together: all of them make the same calls, and the first alone writes files.
    """

    def __init__(
        self, settings: Settings | None = None, *, show_download: bool = False, ranks: Ranks = ALONE
    ) -> None:
        self.settings = settings or Settings()
        self._ranks = ranks
        self._show_download = show_download
        self._weights: Mapping[str, str] = {}  # their name and hash, once they are loaded
        self._network: Vgg19 | None = None
        self._styles: tuple[list[Any], list[Style]] | None = None  # the latest, by what they were made of
        self._lock = threading.Lock()  # the hooks on the network belong to one run

    def __call__(
        self,
        content: Source | None,
        style: Source | Sequence[Source],
        *,
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        init: Source | None = None,
        regions: Sequence[Region] = (),
        protect: Source | None = None,
        on_event: Listener = ignore,
        snapshot_every: int | None = None,
        gradient_hooks: Sequence[GradientHook] = (),
        max_pixels: int | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Result:
        """Paint one picture; arguments, result and errors are those of `stylize.stylize`."""
        if not self._ranks.is_first:
            out = log_dir = None
        _check_kinds(regions, snapshot_every, max_pixels)
        job = _prepare(self.settings, content, style, init, max_pixels, regions, protect)
        with self._ranks.checked_by_first():
            if checkpoint is not None:
                _check_checkpoint(checkpoint, gradient_hooks)
            if out is not None:
                if has_checkpoint(checkpoint) and not overwrite and Path(out).exists():
                    overwrite = _is_unfinished(Path(out), job)
                    if not overwrite:
                        raise OutputError(
                            f"{out} exists already, and it is not this command that has left it unfinished. "
                            f"Choose another name, and for another job another folder than {checkpoint}; or use "
                            "--overwrite."
                        )
                images.check_output(out, overwrite=overwrite, size=job.size)
                _check_spares_inputs(Path(out), job)
            if log_dir is not None:
                check_log_dir(log_dir)
        listen = _Collector(on_event)
        for notice in job.notices:
            listen(Notice(notice))
        wiring = Wiring(listen, snapshot_every, tuple(gradient_hooks))
        with contextlib.ExitStack() as stack:
            with self._lock:
                network = self._load_network()  # first: what is refused leaves no record of a run behind
                kept = None if checkpoint is None else _open_checkpoint(checkpoint, job, self._weights, listen)
                if kept is not None and self._ranks.is_first:
                    stack.enter_context(kept)  # until the picture is saved
                resume = None if kept is None else _load_state(kept, job, network, self._ranks, listen)
                with wired(wiring, log_dir, job.settings) as wiring:
                    wiring = _in_color(wiring, job)
                    styles = self._load_styles(network, job)
                    painting = transfer(
                        network,
                        shown(job.canvas, job.settings),
                        styles[-1 if job.styles else 0],
                        job.settings_of_run,
                        regions=None if job.division is None else Regions(job.division, styles),
                        init=None if job.init is None else shown(job.init.picture.tensor, job.settings),
                        listen=wiring.listen,
                        snapshot_every=wiring.snapshot_every,
                        gradient_hooks=wiring.gradient_hooks,
                        keep=kept if kept and self._ranks.is_first else keep_nothing,
                        resume=resume,
                        ranks=self._ranks,
                    )
            painting = _painting_in_color(painting, job)
            result = _result(job, painting, self._weights, tuple(listen.notices))
            result = result if out is None else _saved(result, out, overwrite)
            if kept is not None and self._ranks.is_first and result.outcome == "done":
                kept.remove()
            return result

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

    def _load_styles(self, network: Vgg19, job: _Job) -> list[Style]:
        """Each region's, and last that of the style pictures together, if there are any."""
        made_of: list[Any] = [[style.identity["sha256"] for style in job.styles]]
        made_of.extend(region.style_identity for region in job.regions)
        if job.content is not None and job.settings.preserve_color != "off":
            made_of.append([job.content.identity["sha256"]])  # whose colours the styles are given
        if self._styles is None or self._styles[0] != made_of:
            styles = [_style_of_region(network, region, job, self.settings) for region in job.regions]
            if job.styles:
                pictures = [shown_style(style.picture.tensor, job.canvas, job.settings) for style in job.styles]
                styles.append(Style(network, pictures, self.settings))
            self._styles = made_of, styles
        return self._styles[1]


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
class _Region:
    """A region whose pictures are read."""

    mask: _Input  # its tensor is [1, 1, H, W], as is that of the style's mask
    style: _Input
    style_mask: _Input | None
    style_scale: float

    @property
    def inputs(self) -> list[_Input]:
        """All its pictures."""
        return [each for each in (self.mask, self.style, self.style_mask) if each is not None]

    @property
    def style_identity(self) -> list[Any]:
        """What its style is made of."""
        mask = None if self.style_mask is None else self.style_mask.identity["sha256"]
        return [self.style.identity["sha256"], mask, self.style_scale]

    @property
    def told(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "mask": self.mask.identity,
            "style": self.style.identity,
            "style_mask": None if self.style_mask is None else self.style_mask.identity,
            "style_scale": self.style_scale,
        }


@dataclass(frozen=True)
class _Job:
    """What one painting needs, read and checked."""

    settings: Settings
    content: _Input | None  # None for a texture
    styles: tuple[_Input, ...]
    init: _Input | None
    regions: tuple[_Region, ...]
    protect: _Input | None  # its tensor is [1, 1, H, W]
    size: tuple[int, int]  # width and height of the result in pixels

    @property
    def inputs(self) -> list[_Input]:
        """All pictures."""
        own = [each for region in self.regions for each in region.inputs]
        return [each for each in (self.content, *self.styles, self.init, *own, self.protect) if each is not None]

    @property
    def division(self) -> Division | None:
        """How the picture is divided, if it is."""
        if not self.regions and self.protect is None:
            return None
        masks = [region.mask.picture.tensor for region in self.regions]
        protect = None if self.protect is None else self.protect.picture.tensor
        return Division(masks, protect, keep_rest=not self.styles)

    @property
    def canvas(self) -> Tensor:
        """The content picture; for a texture, which asks nothing of it but its size, an even grey."""
        width, height = self.size
        return torch.full((1, 3, height, width), 0.5) if self.content is None else self.content.picture.tensor

    @property
    def settings_of_run(self) -> Settings:
        """What `transfer` is told: a texture's size is that of its canvas, which has no detail to hand over."""
        return self.settings if self.content is not None else self.settings.replace(size="full", detail=0.0)

    @property
    def notices(self) -> list[str]:
        """What was to be said about the pictures."""
        return [*(notice for each in self.inputs for notice in each.picture.notices), *_stretched(self)]


def _prepare(
    settings: Settings,
    content: Source | None,
    style: Source | Sequence[Source],
    init: Source | None,
    max_pixels: int | None,
    regions: Sequence[Region],
    protect: Source | None,
) -> _Job:
    """Read all pictures and refuse what can be refused before the weights are loaded."""
    choose_dtype(settings.precision, choose_device(settings.device))
    styles = list(style) if isinstance(style, Sequence) and not isinstance(style, str) else [style]
    _check_style_count(len(styles), settings, any_regions=bool(regions))
    least = minimum_size(settings.content_layers + settings.style_layers)  # as deep as the network will be
    settings = _texture_settings(settings) if content is None else settings
    start = settings.init if init is None else init
    named = isinstance(start, str) and start in NAMED_STARTS
    read_start = None if named else _read(start, max_pixels, _long_side(settings))
    settings = settings.replace(init=start if read_start is None else read_start.picture.source)
    read_content = None if content is None else _read_content(content, max_pixels, settings)
    job = _Job(
        settings=settings,
        content=read_content,
        styles=tuple(_read(each, max_pixels, _style_side(settings)) for each in styles),
        init=read_start,
        regions=tuple(_read_region(region, max_pixels, settings) for region in regions),
        protect=None if protect is None else _read_protect(protect, read_content, max_pixels),
        size=_size(read_content, settings),
    )
    _check_division(job)
    scale_sizes(job.canvas, job.settings_of_run, least)  # refuses what is too small
    is_smaller = read_content is not None and read_content.picture.size != job.size
    source = read_content.picture.tensor.nbytes if read_content is not None and is_smaller else 0
    parts = _parts(len(regions), protect is not None)
    plan_memory(job.size, job.settings_of_run, source_bytes=source, regions=parts)  # refuses what is too large
    return job


def _check_kinds(regions: object, snapshot_every: object, max_pixels: object) -> None:
    if not isinstance(regions, Sequence) or not all(isinstance(region, Region) for region in regions):
        raise SettingsError("regions is a list of Region(mask, style), also for a single one.")
    for name, value in (("snapshot_every", snapshot_every), ("max_pixels", max_pixels)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingsError(f"{name} is {value!r}; it must be a whole number of at least 1, or None.")


def _parts(regions: int, protect: bool) -> int:
    """Of a divided picture: where there are any, the rest is one more."""
    return regions + (regions > 0 or protect)


def _size(content: _Input | None, settings: Settings) -> tuple[int, int]:
    """Width and height of the result in pixels."""
    if content is not None:
        return target_size(*content.picture.size, settings)
    if settings.size == "full":
        raise SettingsError("size 'full' is a content picture's; give the texture's own, such as --size 512x384.")
    return settings.size if isinstance(settings.size, tuple) else (settings.size, settings.size)


def _texture_settings(settings: Settings) -> Settings:
    """The same without what would ask something of a content picture."""
    if settings.preserve_color != "off":
        raise SettingsError("preserve_color keeps the colours of a content picture, and a texture has none.")
    if not settings.style_layers or settings.style_weight == 0:
        raise SettingsError("A texture is made of style alone; give it a style weight and style layers.")
    return settings.replace(content_layers=(), init="noise" if settings.init == "content" else settings.init)


def _check_spares_inputs(out: Path, job: _Job) -> None:
    """Not even `overwrite` means the originals."""
    if out.exists() and any(each.path is not None and out.samefile(each.path) for each in job.inputs):
        raise OutputError(f"{out} is one of the pictures to paint from. Choose another name.")


def _check_style_count(count: int, settings: Settings, *, any_regions: bool = False) -> None:
    if count == 0 and not any_regions:
        raise SettingsError("There is no style picture; give at least one.")
    weights = settings.style_weights
    if weights is not None and len(weights) != count:
        raise SettingsError(
            f"style_weights has {len(weights)} values for {count} style pictures; give one for each."
        )
    sources = settings.style_layer_sources or (0,)
    if max(sources) > count:
        raise SettingsError(
            f"style_layer_sources names style picture {max(sources)}, and there are {count}; give as many styles."
        )
    unused = set(range(1, count + 1)) - set(sources)
    if 0 not in sources and unused:
        raise SettingsError(
            f"No style layer follows style picture {min(unused)}; name layers for it, or leave the picture out."
        )


def _read(source: Source, max_pixels: int | None, long_side: int) -> _Input:
    """Read a picture, and no larger than it takes for a use at `long_side`."""
    limit = max_pixels or images.DEFAULT_MAX_PIXELS
    return _identified(source, images.read_picture(source, max_pixels=limit, long_side=long_side))


def _identified(source: Source, picture: images.Picture) -> _Input:
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    name = picture.source if path is None else path.name
    sha256 = hashlib.sha256(picture.tensor.numpy().data).hexdigest() if path is None else file_hash(path)
    if sha256 is None:
        raise PictureError(f"{source!s} was taken away while it was read. Put it back, or choose another.")
    return _Input(picture, path, {"name": name, "sha256": sha256})


def _read_content(source: Source, max_pixels: int | None, settings: Settings) -> _Input:
    """Read a content picture; one that was read smaller has exactly the result's size then.

    Its full size decides that: what was read of it may have other proportions, by rounding to whole pixels.
    """
    content = _read(source, max_pixels, _long_side(settings))
    picture = content.picture
    if picture.reduced_from is None:
        return content
    tensor = resize(picture.tensor, target_size(*picture.reduced_from, settings))
    return dataclasses.replace(content, picture=dataclasses.replace(picture, tensor=tensor))


def _read_region(region: Region, max_pixels: int | None, settings: Settings) -> _Region:
    long_side = math.ceil(min(sys.maxsize, _style_side(settings) * region.style_scale))
    return _Region(
        _read_mask(region.mask, max_pixels),
        _read(region.style, max_pixels, long_side),
        None if region.style_mask is None else _read_mask(region.style_mask, max_pixels),
        region.style_scale,
    )


def _read_mask(source: Source, max_pixels: int | None) -> _Input:
    mask = _identified(source, images.read_mask(source, max_pixels=max_pixels or images.DEFAULT_MAX_PIXELS))
    if mask.picture.tensor.max() == 0:
        raise PictureError(
            f"The mask {mask.picture.source} chooses nothing: it is black, or transparent, everywhere. "
            "Make white what it is to choose."
        )
    return mask


def _read_protect(source: Source, content: _Input | None, max_pixels: int | None) -> _Input:
    if content is None:
        raise SettingsError("protect keeps parts of a content picture, and a texture has none.")
    if not isinstance(source, str) or source != ALPHA:
        return _read_mask(source, max_pixels)
    if content.picture.alpha is None:
        raise PictureError(
            f"{content.picture.source} is transparent nowhere, so protect 'alpha' would keep nothing. "
            "Give a mask, or a picture with transparency."
        )
    mask = images.Picture(1 - content.picture.alpha, None, ALPHA)
    return _Input(mask, None, {**content.identity, "name": ALPHA})


def _check_division(job: _Job) -> None:
    """Refuse regions that cannot be measured, or of which nothing is left to paint."""
    if job.division is None:
        return
    additive_loss(job.settings.style_loss)
    size = fit(*job.size, min(max(job.size), CHECKED_SIDE))
    left = job.division.cover(size).amax(dim=(1, 2)).tolist()
    if not any(left):
        raise SettingsError("protect keeps the whole picture: there is nothing to paint. Choose less of it.")
    for region, most in zip(job.regions, left, strict=False):
        if most == 0:
            raise SettingsError(
                f"The region of {region.mask.picture.source} lies wholly in what protect keeps; "
                "leave the region out, or protect less."
            )


def _stretched(job: _Job) -> list[str]:
    """Of which masks the user should know that they have other proportions than the picture."""
    masks = [region.mask for region in job.regions] + ([] if job.protect is None else [job.protect])
    proportions = math.log(job.size[0] / job.size[1])
    return [
        f"{mask.picture.source} has other proportions than the picture and is stretched to them."
        for mask in masks
        if abs(math.log(mask.picture.size[0] / mask.picture.size[1]) - proportions) > STRETCHED
    ]


def _style_of_region(network: Vgg19, region: _Region, job: _Job, settings: Settings) -> Style:
    picture = shown_style(region.style.picture.tensor, job.canvas, job.settings)
    own = settings.replace(
        style_scale=settings.style_scale * region.style_scale, style_weights=None, style_layer_sources=None
    )
    mask = None if region.style_mask is None else region.style_mask.picture.tensor
    return Style(network, [picture], own, mask)


def _long_side(settings: Settings) -> int:
    """How large a picture can be of use at most, in pixels."""
    sides = settings.size if isinstance(settings.size, tuple) else (settings.size,)
    return max(sys.maxsize if side == "full" else side for side in sides)


def _style_side(settings: Settings) -> int:
    """The same for a style picture, which is measured at another scale."""
    return min(sys.maxsize, math.ceil(_long_side(settings) * settings.style_scale))


def _in_color(wiring: Wiring, job: _Job) -> Wiring:
    """The same; or, where only lightness is painted, so that the picture stays grey and is shown in colour."""
    if job.settings.preserve_color != "luminance":
        return wiring
    listen = showing_chroma(wiring.listen, job.canvas)
    return Wiring(listen, wiring.snapshot_every, (*wiring.gradient_hooks, keep_grey))


def _painting_in_color(painting: Painting, job: _Job) -> Painting:
    """The same with the content's chroma, where only lightness was painted; one Ctrl-C is obeyed afterwards."""
    if job.settings.preserve_color != "luminance":
        return painting
    try:
        return dataclasses.replace(painting, image=with_chroma(painting.image, job.canvas))
    except KeyboardInterrupt:
        if painting.outcome == "interrupted":
            raise  # asked a second time
        image = with_chroma(painting.image, job.canvas)
        return dataclasses.replace(painting, image=image, outcome="interrupted", reason=INTERRUPTED)


def _result(job: _Job, painting: Painting, weights: Mapping[str, str], notices: tuple[str, ...]) -> Result:
    alpha = None if job.content is None else job.content.picture.alpha
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
    return _told_before(job, weights) | {
        "outcome": painting.outcome,
        "evaluations": painting.evaluations,
        "losses": dict(painting.losses),
    }


def _told_before(job: _Job, weights: Mapping[str, str]) -> dict[str, Any]:
    """The part of the record that is known before anything is painted."""
    device = choose_device(job.settings.device)
    settings = job.settings.replace(checkpoint_every_s=Settings.checkpoint_every_s)  # which changes no picture
    return {
        "program": "stylize",
        "version": __version__,
        "settings": settings.as_dict(),
        "content": None if job.content is None else job.content.identity,
        "styles": [style.identity for style in job.styles],
        "init": None if job.init is None else job.init.identity,
        "regions": [region.told for region in job.regions],
        "protect": None if job.protect is None else job.protect.identity,
        "weights": weights,
        "device": device.type,
        "dtype": str(choose_dtype(job.settings.precision, device)).removeprefix("torch."),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "pillow")},
        },
    }


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """What of a record makes two jobs the same: not what files are called, nor how the run went."""
    told = {name: value for name, value in record.items() if name not in _NOT_OF_THE_JOB}
    return {name: _without_names(value) for name, value in told.items()} | {"settings": record["settings"]}


_NOT_OF_THE_JOB = ("program", "versions", "outcome", "evaluations", "losses")


def _without_names(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_names(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_names(each) for key, each in value.items() if key != "name"}
    return value


def _check_checkpoint(folder: str | os.PathLike[str], gradient_hooks: Sequence[GradientHook]) -> None:
    if gradient_hooks:
        raise SettingsError("A checkpoint cannot tell whether gradient_hooks are the same; leave out one of them.")
    check_folder(folder)


def _open_checkpoint(
    folder: str | os.PathLike[str], job: _Job, weights: Mapping[str, str], listen: Listener
) -> Checkpoint:
    identity = _identity(_told_before(job, weights))
    return Checkpoint(folder, identity, job.settings.checkpoint_every_s, listen)


def _load_state(
    checkpoint: Checkpoint, job: _Job, network: Vgg19, ranks: Ranks, listen: Listener
) -> dict[str, Any] | None:
    count = 0 if job.division is None else len(job.regions) + bool(job.styles)

    def check(state: dict[str, Any]) -> None:
        check_state(state, network, job.canvas, job.settings_of_run, regions=count, ranks=ranks)

    state = checkpoint.load(check)
    if state is not None:
        made = len(state["history"]) + len((state["under_way"] or {"history": ()})["history"])
        listen(Notice(f"The run goes on from {checkpoint.path}, after {made} evaluations."))
    return state


def _is_unfinished(out: Path, job: _Job) -> bool:
    """Is this the picture of the same job, saved when it was interrupted?"""
    try:
        record = images.read_record(out)
        there, here = _identity(record), _identity(json.loads(json.dumps(_told_before(job, {}))))
    except (PictureError, AttributeError, KeyError, TypeError):
        return False  # none at all, or not one of ours
    del there["weights"], here["weights"]  # which are not loaded yet
    return record.get("outcome") == "interrupted" and there == here


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

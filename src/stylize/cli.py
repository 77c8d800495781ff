"""The command `stylize`: paint a picture; look into a result; list the presets.

What needs torch is imported inside the commands, so that `--help` and a misspelt option answer at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import click
from click.core import ParameterSource

from stylize import __version__
from stylize.errors import (
    InputError,
    OutputError,
    PictureError,
    RefusedError,
    SaveError,
    SettingsError,
    StylizeError,
)
from stylize.process import prepare
from stylize.regions import Region, described, files_of, parse_region
from stylize.settings import CHOICES, Settings, gigabytes, parse_bytes, preset_names, preset_summary
from stylize.web.limits import MEGABYTE, Limits

if TYPE_CHECKING:
    from stylize.api import Result, UnsavedError
    from stylize.batch.report import BatchEvent, BatchReport
    from stylize.events import Event, Listener, Snapshot
    from stylize.progress import FolderView

    ParamType: TypeAlias = click.ParamType[Any]
else:
    ParamType = click.ParamType  # generic in newer releases of click only

DONE, FAILED, REFUSED, FAILURES, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = {
    **{"done": DONE, "failed": FAILED, "interrupted": INTERRUPTED},
    **{"planned": DONE, "failures": FAILURES, "stopped": FAILED},  # of folders
}
LIMITS = Limits()  # of the web page
MOST_LISTED = 50  # failures in a terminal; the report has all of them
TRACEBACK = "STYLIZE_TRACEBACK"  # set in the environment, it lets an unexpected error through

USAGE = "[OPTIONS] CONTENT STYLE..."
EXAMPLE = "stylize photo.jpg starry_night.jpg --size 768 --out result.png"


# ---- options: one for each setting, with its default ---------------------------------------------------


class Parsed(ParamType):
    """A kind of value that a function makes of the text; its ValueError says what is wrong."""

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text's meaning; a default has it already."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _or_none(parse: Callable[[str], object]) -> Callable[[str], object]:
    """`none` takes back what a preset or a file says."""
    return lambda text: None if text == "none" else parse(text)


def _size(text: str) -> int | str | tuple[int, ...]:
    if text == "full":
        return text
    with _saying(f"{text!r} is neither a whole number of pixels, nor 'full', nor two sides such as 512x384."):
        sides = tuple(int(side) for side in text.lower().split("x"))
    return sides if len(sides) > 1 else sides[0]


def _count(text: str) -> int:
    with _saying(f"{text!r} is not a whole number."):
        return int(text)


def _pixels(text: str) -> int:
    """`300M`, `300MP`, `3e8` or `300000000`."""
    number = text.strip().upper().removesuffix("P")
    unit = {"K": 10**3, "M": 10**6, "G": 10**9}.get(number[-1:])
    with _saying(f"{text!r} is not a number of pixels such as 300M, 300MP, 3e8 or 300000000."):
        count = float(number) if unit is None else float(number[:-1]) * unit
        if not 1 <= count < 1e18:  # not a number is neither
            raise ValueError
    return round(count)


def _number(text: str) -> float:
    with _saying(f"{text!r} is not a number."):
        return float(text)


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "min": 60, "h": 3600}
    number = text.rstrip("smhin ")
    with _saying(f"{text!r} is not a time such as 90, 60s, 2m or 1h."):
        unit = units[text[len(number) :].strip() or "s"]
        return float(number) * unit


def _text(text: str) -> str:
    if not text:
        raise ValueError("it is empty, as a variable is that was never set.")
    return text


def _path(text: str) -> Path:
    return Path(_text(text))  # Path("") would be the working directory


def _names(text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(_number(part) for part in text.split(","))


class Layers(NamedTuple):
    """What a list of layers says: names; their weights, and the STYLE that each follows, where it says them."""

    names: tuple[str, ...]
    weights: tuple[float, ...] | None
    sources: tuple[int, ...] | None = None


def _weighted_layers(text: str) -> Layers:
    """`relu1_1,relu2_1` or `relu1_1=4,relu2_1=3`."""
    parts = [part.partition("=") for part in _names(text)]
    names = tuple(name.strip() for name, _, _ in parts)
    if not any(equals for _, equals, _ in parts):
        return Layers(names, None)
    if not all(equals for _, equals, _ in parts):
        raise ValueError("give every layer a weight, as in relu1_1=4,relu2_1=3, or none of them.")
    return Layers(names, tuple(_number(weight) for _, _, weight in parts))


def _style_layers(text: str) -> Layers:
    """The same, or in groups, one for each STYLE: `relu3_1,relu4_1/relu1_1`."""
    groups = text.split("/")
    layers = _weighted_layers(",".join(groups))
    if len(groups) == 1:
        return layers
    sources = [number for number, group in enumerate(groups, start=1) for _ in _names(group)]
    return layers._replace(sources=tuple(sources))


@contextlib.contextmanager
def _saying(message: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError) as error:
        raise ValueError(message) from error


class Option(click.Option):
    """An option that stands under a heading in the help."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


PATH = Parsed("PATH", _path)  # what can be read and written is found out by `images`
SWITCH = click.BOOL
SIZE = Parsed("PX", _size)
COUNT, NUMBER = Parsed("N", _count), Parsed("X", _number)
MAYBE_COUNT, MAYBE_NUMBER = Parsed("N", _or_none(_count)), Parsed("X", _or_none(_number))
NUMBERS, MAYBE_NUMBERS = Parsed("X,X,…", _numbers), Parsed("X,X,…", _or_none(_numbers))
SECONDS, PIXELS = Parsed("TIME", _or_none(_seconds)), Parsed("N", _pixels)
BYTES = Parsed("SIZE", _or_none(parse_bytes))
LAYERS, WEIGHTED_LAYERS = Parsed("LAYERS", _names), Parsed("LAYERS", _weighted_layers)
STYLE_LAYERS = Parsed("LAYERS", _style_layers)
MAYBE_COUNTS = Parsed("N,N,…", _or_none(_counts))
START, WEIGHTS, DEVICE = Parsed("START", _text), Parsed("WEIGHTS", _text), Parsed("DEVICE", _text)
CONFIG = Parsed("CONFIG", _text)
REGION, MASK = Parsed("MASK=STYLE", parse_region), Parsed("MASK", _text)


def _choice(setting: str) -> click.Choice[str]:
    return click.Choice(CHOICES[setting])


# section: {setting: (kind of value, help)}
SETTINGS: Mapping[str, Mapping[str, tuple[ParamType, str]]] = {
    "Picture": {
        "size": (SIZE, "Long side of the result in pixels; 'full': as CONTENT; WxH: of a texture."),
        "upscale": (SWITCH, "May the result be larger than CONTENT?"),
        "quality": (_choice("quality"), "When a scale is good enough to go on."),
        "iterations": (MAYBE_COUNT, "Evaluations over all scales, in place of --quality's own rule."),
        "time_budget_s": (SECONDS, "Time for the optimisation, as 60s or 2m, in place of --quality's rule."),
        "scales": (MAYBE_COUNT, "How many sizes, each twice the one before; else from about 128 px on."),
    },
    "Style and content": {
        "content_weight": (NUMBER, "How much CONTENT counts."),
        "style_weight": (NUMBER, "How much STYLE counts."),
        "tv_weight": (NUMBER, "How much smoothness counts."),
        "detail": (NUMBER, "Of CONTENT's fine detail: 0 is painterly, 1 photographic."),
        "style_scale": (NUMBER, "Size of the strokes: STYLE's long side over the result's."),
        "style_weights": (MAYBE_NUMBERS, "Shares of several STYLEs, in their order; else all alike."),
        "content_layers": (WEIGHTED_LAYERS, "Layers that measure CONTENT; 'detail': those that suit --detail."),
        "content_layer_weights": (NUMBERS, "Weights of the content layers, in their order."),
        "style_layers": (
            STYLE_LAYERS,
            "Layers that measure STYLE: alike, or as relu1_1=4,relu2_1=3; with / between those of several STYLEs.",
        ),
        "style_layer_weights": (NUMBERS, "Weights of the style layers, in their order."),
        "style_layer_sources": (MAYBE_COUNTS, "Number of the STYLE that each style layer follows; 0 is the blend."),
        "style_loss": (_choice("style_loss"), "What of the styles is compared: docs/settings.md shows each."),
        "normalization": (_choice("normalization"), "The losses' form; two need --style-loss gram."),
        "preserve_color": (
            _choice("preserve_color"),
            "Keep CONTENT's colours: paint its lightness alone, or match STYLE's colours to its own first.",
        ),
        "color_match": (_choice("color_match"), "How colours are matched."),
    },
    "Search": {
        "init": (START, "Where to start: content, noise, style, or the path of a picture."),
        "seed": (COUNT, "Of the noise."),
        "optimizer": (_choice("optimizer"), "What makes the steps."),
        "history": (COUNT, "Curvature pairs that L-BFGS remembers."),
        "history_precision": (_choice("history_precision"), "Of those pairs; bf16 takes half the memory."),
        "step_levels": (MAYBE_NUMBER, "First step of L-BFGS, every step of Adam, in grey levels of 255."),
        "range_weight": (NUMBER, "What values beyond black and white cost; the file cannot hold them."),
        "clip_norm": (MAYBE_NUMBER, "Guard on the norm of the picture's gradient."),
        "clip_value": (MAYBE_NUMBER, "Guard on each value of the picture's gradient."),
        "normalize_gradients": (SWITCH, "Give each loss's gradient the size of its weight: docs/settings.md."),
    },
    "Network and machine": {
        "weights": (WEIGHTS, "embedded, torchvision (a download), or the path of a state dict."),
        "weights_normalization": (click.Choice(["caffe", "torchvision"]), "Of a state dict from a path."),
        "pooling": (_choice("pooling"), "How the network halves its features."),
        "padding": (_choice("padding"), "What the network sees beyond the border."),
        "precision": (_choice("precision"), "Of the network; auto is bf16 where that is fast."),
        "memory_limit": (BYTES, "Of the program, as 6GB: larger pictures are painted in tiles; else what is free."),
        "device": (DEVICE, "auto, cpu, cuda, cuda:N or mps."),
        "checkpoint_every_s": (SECONDS, "Time between two writings of the --checkpoint, as 60s or 10m."),
    },
}


def flag(setting: str) -> str:
    """The option of a setting: `--time-budget` for time_budget_s."""
    return "--" + setting.removesuffix("_s").replace("_", "-")


def _setting_options() -> list[click.Parameter]:
    defaults = vars(Settings())
    return [
        Option(
            [f"{flag(name)}/--no-{flag(name)[2:]}" if kind is SWITCH else flag(name), name],
            type=kind,
            default=defaults[name],
            show_default=True,
            help=text,
            section=section,
        )
        for section, settings in SETTINGS.items()
        for name, (kind, text) in settings.items()
    ]


def _region_options() -> list[click.Parameter]:
    def option(spelling: str, **more: Any) -> Option:
        return Option([spelling], section="Regions", **more)

    return [
        option("--region", type=REGION, multiple=True, help="A style of its own where MASK is white; repeatable."),
        option("--protect", type=MASK, help="Keep CONTENT where MASK is white, or 'alpha': where it is clear."),
    ]


def _output_options() -> list[click.Parameter]:
    def option(*spellings: str, **more: Any) -> Option:
        return Option(spellings, section="Output", **more)

    positive = click.IntRange(1)
    known = ", ".join(preset_names())
    return [
        option("--content", type=click.Choice(["none"]), help="A texture of STYLE; all arguments are STYLEs then."),
        option("--out", type=PATH, help="A .png, .jpg, .webp or .tiff; else CONTENT_STYLE.png, here."),
        option("--overwrite", is_flag=True, help="Replace a picture that exists."),
        option("--config", "--preset", type=CONFIG, help=f"{known}, a TOML file, or a former result."),
        option("--save-every", type=positive, metavar="N", help="Save every Nth picture beside the result."),
        option("--checkpoint", type=PATH, metavar="DIR", help="Keep the run there; the same command goes on."),
        option("--log-dir", type=PATH, metavar="DIR", help="Record the run there, for `plot` and TensorBoard."),
        option("--max-pixels", type=PIXELS, help="Read pictures of up to so many, as 300M; else 178,956,970."),
        option("--quiet", is_flag=True, help="Say nothing but errors."),
        option("--json", "as_json", is_flag=True, help="Print one report as JSON on standard output."),
    ]


# name: (spelling, what click is told); names are those of `stylize_folder`
FOLDER_OPTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "include": ("--include", {"multiple": True, "metavar": "GLOB", "help": "Only these, as '*.jpg' or 'trip/*'."}),
    "exclude": ("--exclude", {"multiple": True, "metavar": "GLOB", "help": "Leave these out."}),
    "suffix": (
        "--format",
        {"type": click.Choice(["png", "jpg", "webp", "tiff"]), "default": "png", "help": "Of the results."},
    ),
    "dry_run": ("--dry-run", {"is_flag": True, "help": "Say what would be done, and what it would cost."}),
    "retry_failed": ("--retry-failed", {"is_flag": True, "help": "Paint again what failed before."}),
    "fail_fast": ("--fail-fast", {"is_flag": True, "help": "End at the first picture that fails."}),
    "shard": ("--shard", {"metavar": "I/N", "help": "Paint part I of N, beside others that paint theirs."}),
    "engine": (
        "--engine",
        {"type": click.Choice(["auto", "inline", "processes", "ray"]), "default": "auto", "help": "Who paints."},
    ),
    "workers": ("--workers", {"type": click.IntRange(1), "metavar": "N", "help": "Processes, or actors of Ray."}),
    "threads": ("--threads", {"type": click.IntRange(1), "metavar": "N", "help": "Of each worker."}),
    "ray_address": ("--ray-address", {"metavar": "ADDRESS", "help": "Of a Ray cluster: auto, or HOST:PORT."}),
}


def _folder_options() -> list[click.Parameter]:
    return [
        Option([spelling, name], section="Folders", show_default="default" in more, **more)
        for name, (spelling, more) in FOLDER_OPTIONS.items()
    ]


# ---- commands -------------------------------------------------------------------------------------------


class Program(click.Group):
    """Without the name of a command, `paint` is meant; every way out is one line and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `paint` in front when no command is named."""
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else ["paint", *args])

    def main(self, args: Sequence[str] | None = None, *_: Any, **__: Any) -> NoReturn:
        """Run one command line and exit."""
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(arguments, prog_name="stylize", standalone_mode=False) or DONE
        except (Exception, KeyboardInterrupt) as error:
            message, code = _verdict(error)
            if code == REFUSED and int(os.environ.get("LOCAL_RANK", "0")):
                sys.exit(code)  # the first process of this machine has said it
            if TRACEBACK in os.environ and TRACEBACK in message:
                raise
            _say(message)
            if "--json" in arguments:
                _print(json.dumps({"error": message, "exit_code": code}))
        sys.exit(code)


class Interrupted(click.ClickException):
    """Ctrl-C, and there is no picture to show for it."""


def _verdict(error: BaseException) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    match error:
        case Interrupted() | click.Abort():
            return str(error) or "Interrupted.", INTERRUPTED
        case click.MissingParameter() if error.ctx is not None and isinstance(error.ctx.command, Paint):
            return f"{error.format_message()} For example: {EXAMPLE}", REFUSED
        case click.ClickException():
            return error.format_message(), REFUSED
        case RefusedError() | InputError():
            return str(error), REFUSED
        case StylizeError():
            return str(error), FAILED
    if _is_out_of_memory(error):
        return "There is not enough memory. Use a smaller --size.", FAILED
    said = f"{type(error).__name__}: {error}".rstrip(".")
    return f"{said}. This is a defect; run again with {TRACEBACK}=1 for the traceback.", FAILED


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's way to say it, and torch's; torch may not be imported here."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "allocate memory" in str(error) or "not enough memory" in str(error)


class Paint(click.Command):
    """The command that paints; its options stand under headings."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As it is typed: without the name of the command."""
        formatter.write_usage("stylize", USAGE)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options by section, then the other commands."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and line is not None:
                sections.setdefault(getattr(parameter, "section", "Help"), []).append(line)
        for section, lines in sections.items():
            with formatter.section(section):
                formatter.write_dl(lines)
        with formatter.section("Other commands"):
            others = {name: each for name, each in program.commands.items() if each is not self}
            formatter.write_dl([(name, each.get_short_help_str(100)) for name, each in others.items()])


@click.group(cls=Program)
def program() -> None:
    """Paint one picture in the manner of another."""


def main() -> None:
    """The command of the operating system."""
    prepare()
    try:
        program()
    finally:
        # What is left is Python's own shutdown; a second Ctrl-C may cut it short without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@program.command(
    cls=Paint,
    params=[*_setting_options(), *_region_options(), *_output_options(), *_folder_options()],
    epilog=f"For example: {EXAMPLE}",
    context_settings={"max_content_width": 100},
)
@click.argument("first", type=PATH, metavar="CONTENT")
@click.argument("style", type=PATH, nargs=-1, metavar="STYLE...")
@click.version_option(__version__, message="stylize %(version)s")
@click.pass_context
def paint(
    ctx: click.Context,
    /,
    first: Path,
    style: tuple[Path, ...],
    content: str | None,
    region: tuple[Region, ...],
    protect: str | None,
    out: Path | None,
    config: str | None,
    overwrite: bool,
    save_every: int | None,
    checkpoint: Path | None,
    log_dir: Path | None,
    max_pixels: int | None,
    quiet: bool,
    as_json: bool,
    **values: Any,
) -> int:
    """Paint CONTENT in the manner of STYLE, or of several STYLEs together.

    CONTENT may be a folder, whose pictures are painted into the folder --out; STYLE may be a folder, whose
    pictures are used in turn. With --content none there is no CONTENT, and a texture of STYLE is painted.
    """
    photo = None if content else first
    style = (first, *style) if content else style
    if not style and not region:
        raise click.MissingParameter(ctx=ctx, param=_parameter(ctx, "style"))
    for_folders = {name: values.pop(name) for name in FOLDER_OPTIONS}
    if any(map(os.path.isdir, (first, *style))):
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise SettingsError("torchrun is for one picture; for folders use --workers, --engine ray or --shard.")
        one = ("save_every", "checkpoint", "log_dir", "content", "region", "protect")
        _refuse_given(ctx, one, "is for one picture, not folders")
        for_folders |= {"overwrite": overwrite, "max_pixels": max_pixels}
        chosen = {"config": config, **_given(ctx, values)}
        return _paint_folder(first, style, out, chosen | for_folders, quiet=quiet, as_json=as_json)
    _refuse_given(ctx, FOLDER_OPTIONS.keys() - {"dry_run"}, "is for folders, and there is none")
    region_files = [path for each in region for path in files_of(each)]
    out = out or _default_out(photo, [*style, *(Path(str(each.style)) for each in region)])
    watch = Watch(out)
    trouble = None
    with _stoppable(watch), contextlib.ExitStack() as stack:
        from stylize import api, progress
        from stylize.checkpoint import has_checkpoint
        from stylize.nst.ranks import ALONE, is_started_by_torchrun, joined

        settings = api.load_settings(config, **_given(ctx, values))
        ranks = stack.enter_context(joined(settings.device)) if is_started_by_torchrun() else ALONE
        if not ranks.is_first:  # which speaks for all
            quiet, as_json, save_every = True, False, None
        if for_folders["dry_run"]:
            plan = api.plan(photo, settings, regions=len(region), protect=protect is not None)
            told = {**dataclasses.asdict(plan), "total": plan.total}
            _print(json.dumps(told, indent=2) if as_json else str(plan))
            return 0
        if not region and not protect and not quiet:
            _say_masks(config)
        if save_every:
            own = overwrite or has_checkpoint(checkpoint)  # what the run that it is of has left
            inputs = (first, *style, Path(settings.init), *region_files, Path(protect or settings.init))
            _check_snapshots(out, inputs, overwrite=own)
        relative = settings.normalization == "relative"
        with progress.showing(
            sys.stderr, quiet=quiet, relative=relative, budget_s=settings.time_budget_s
        ) as watch.show:
            try:
                result = api.Stylizer(settings, show_download=not quiet, ranks=ranks)(
                    photo,
                    style,
                    out=out,
                    overwrite=overwrite,
                    on_event=watch,
                    snapshot_every=save_every,
                    max_pixels=max_pixels,
                    log_dir=log_dir,
                    checkpoint=checkpoint,
                    regions=region,
                    protect=protect,
                )
            except api.UnsavedError as error:
                result, trouble = _saved_elsewhere(error, out)
        if not ranks.is_first:
            return 0
    return _report(result, trouble, quiet=quiet, as_json=as_json)


@program.command()
@click.argument("picture", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the whole record as JSON.")
def info(picture: Path, as_json: bool) -> None:
    """Print the settings inside a result, as TOML that --config reads."""
    from stylize import images

    record = images.read_record(picture)
    try:
        _print(json.dumps(record, indent=2) if as_json else _described(record))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PictureError(f"{picture} tells only a part of how it was made; --json prints it.") from error
    except SettingsError as error:
        raise SettingsError(f"{picture}: {error} Another release made it; --json prints all of it.") from error


@program.command()
def presets() -> None:
    """List the presets that --config knows by name, each with what it is for."""
    width = max(len(name) for name in preset_names())
    for name in preset_names():
        _print(f"{name:<{width}}  {preset_summary(name)}")


@program.command("inspect")
@click.argument("content", type=PATH)
@click.argument("style", type=PATH, required=False)
@click.option("--out", type=PATH, required=True, metavar="DIR", help="The folder for report.html and its pictures.")
@click.option("--result", type=PATH, metavar="FILE", help="What was painted from the two; its settings are used.")
@click.option("--layers", type=LAYERS, default=None, help="Layers to look at; else all that the settings measure.")
@click.option("--size", type=SIZE, default=None, help="Long side of the pictures in pixels, without a --result.")
@click.option("--class", "explain", metavar="CLASS", help="Find an ImageNet class: its name or number, or 'top'.")
@click.option("--classifier", default="torchvision", metavar="WEIGHTS", show_default=True, help="Of --class.")
@click.option("--config", type=CONFIG, help="Explain the losses of a preset, a TOML file or a former result.")
@click.option("--max-pixels", type=PIXELS, help="Read pictures of up to so many, as 300M; else 178,956,970.")
@click.option("--overwrite", is_flag=True, help="Replace a report that exists.")
def inspect_(
    content: Path,
    style: Path | None,
    out: Path,
    result: Path | None,
    layers: tuple[str, ...] | None,
    size: int | str | None,
    explain: str | None,
    classifier: str,
    config: str | None,
    max_pixels: int | None,
    overwrite: bool,
) -> None:
    """Write a report on what the network sees in CONTENT, STYLE and a result."""
    from stylize import api
    from stylize.inspect.inspection import inspect_picture

    report = inspect_picture(
        content,
        style,
        out=out,
        result=result,
        layers=layers,
        settings=None if config is None else api.load_settings(config),
        explain=explain,
        classifier=classifier,
        overwrite=overwrite,
        max_pixels=max_pixels,
        **({} if size is None else {"size": size}),
    )
    for finding in report.findings:
        _say(finding.text)
    _print(os.fsencode(report.path))


@program.command()
@click.argument("trace", type=PATH)
@click.option("--out", type=PATH, metavar="PNG", help="Where to save; else beside TRACE, as trace.png.")
@click.option("--overwrite", is_flag=True, help="Replace a picture that exists.")
def plot(trace: Path, out: Path | None, overwrite: bool) -> None:
    """Draw the curves of a run from the TRACE that --log-dir has written, or its folder."""
    from stylize.inspect.extra import require

    require("matplotlib")
    from stylize.inspect.plot import plot_trace

    path, findings = plot_trace(trace, out, overwrite=overwrite)
    for finding in findings:
        _say(finding.text)
    _print(os.fsencode(path))


@program.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen; 0.0.0.0 lets others in.")
@click.option("--port", type=click.IntRange(0, 65535), default=7860, show_default=True, help="0 takes a free one.")
@click.option("--auth", metavar="USER:PASSWORD", envvar="STYLIZE_AUTH", help="Ask visitors for it.")
@click.option("--token", metavar="TOKEN", help="Let in who knows it; 'auto' makes one up.")
@click.option("--device", "devices", type=DEVICE, multiple=True, default=["auto"], help="One job at a time on it.")
@click.option("--max-size", type=click.IntRange(64, 16384), default=LIMITS.size, metavar="PX", help="Of a result.")
@click.option("--max-upload", type=click.IntRange(1), default=LIMITS.upload_bytes // MEGABYTE, metavar="MB")
@click.option("--max-pixels", type=click.IntRange(1), default=LIMITS.pixels, metavar="N", help="Of an upload.")
@click.option("--open/--no-open", "opened", default=False, help="Open the page in the browser.")
def serve(
    host: str,
    port: int,
    auth: str | None,
    token: str | None,
    devices: tuple[str, ...],
    max_size: int,
    max_upload: int,
    max_pixels: int,
    opened: bool,
) -> None:
    """Open the web page: paint, watch and compare in a browser."""
    if find_spec("gradio") is None:
        raise RefusedError("The page needs gradio, which is not installed. Run: pip install 'stylize-nst[web]'")
    limits = dataclasses.replace(LIMITS, size=max_size, upload_bytes=max_upload * MEGABYTE, pixels=max_pixels)

    def tell(address: str) -> None:
        _print(address)
        _say("The page is at this address. Ctrl-C ends it.")
        if opened:
            click.launch(address)

    with tempfile.TemporaryDirectory(prefix="stylize-web-") as folder:
        # Said before Gradio is loaded: no telemetry, and its own folders in ours.
        os.environ.update(GRADIO_ANALYTICS_ENABLED="False", GRADIO_TEMP_DIR=folder)
        from stylize.web import server

        server.serve(
            host=host,
            port=port,
            auth=auth,
            token=token,
            devices=devices,
            limits=limits,
            folder=Path(folder),
            tell=tell,
        )


# ---- folders --------------------------------------------------------------------------------------------


def _paint_folder(
    content: Path,
    styles: Sequence[Path],
    out: Path | None,
    chosen: Mapping[str, Any],
    *,
    quiet: bool,
    as_json: bool,
) -> int:
    """Paint every picture in a folder; the exit code."""
    from stylize import api, progress
    from stylize.batch.plan import parse_shard

    options = {**chosen, "suffix": f".{chosen['suffix']}"}
    options["shard"] = None if chosen["shard"] is None else parse_shard(chosen["shard"])
    stop = threading.Event()
    with progress.showing_folder(sys.stderr, quiet=quiet) as view, _stopping(stop):
        report = api.stylize_folder(
            content, styles, out or "outputs", on_event=_passing_to(view), stop=stop, **options
        )
    code = EXIT_CODES[report.outcome]
    if not quiet:
        _say_folder(report)
    if code not in (DONE, FAILURES):
        _say(report.reason)
    if as_json:
        _print(json.dumps(report.as_dict() | {"exit_code": code}))
    elif not quiet:
        for path in [report.out / name for name in report.left] if chosen["dry_run"] else [report.out]:
            _print(os.fsencode(path))
    return code


def _parameter(ctx: click.Context, name: str) -> click.Parameter:
    return next(each for each in ctx.command.params if each.name == name)


def _refuse_given(ctx: click.Context, names: Iterable[str], why: str) -> None:
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name in names and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise SettingsError(f"{parameter.opts[0]} {why}.")


@contextlib.contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """The first signal lets what is being painted be finished, the second ends at once."""

    def stop_or_end(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        with contextlib.suppress(RuntimeError, OSError):  # just while something else is being said
            _say("What is being painted will be finished. A second Ctrl-C ends at once.")

    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    before = {number: signal.getsignal(number) for number in numbers if in_main_thread}
    taken = {number: old for number, old in before.items() if old is not signal.SIG_IGN}  # as nohup does
    for number in taken:
        signal.signal(number, stop_or_end)
    try:
        yield
    finally:
        for number, old in taken.items():
            signal.signal(number, old)


def _passing_to(view: FolderView) -> Callable[[BatchEvent], None]:
    """A listener that shows what happens; a terminal that is gone ends no run."""
    from stylize.batch.report import BatchStarted, PictureEnded, PictureEvent

    def listen(event: BatchEvent) -> None:
        with contextlib.suppress(OSError):
            match event:
                case BatchStarted():
                    view.start(event.todo)
                case PictureEvent():
                    view.show(event.name, event.event)
                case PictureEnded():
                    view.end(event.entry.name, event.entry.error, event.entry.seconds)

    return listen


def _say_folder(report: BatchReport) -> None:
    """What was done, what was not, and why."""
    for ignored in report.ignored[:MOST_LISTED]:
        _say(f"ignored: {ignored.path}: {ignored.reason}")
    for entry in report.failed[:MOST_LISTED]:
        _say(f"failed: {entry.name}: {entry.error}")
    lists = (("ignored", report.ignored), ("failed", report.failed))
    more = [f"{len(each) - MOST_LISTED} more {what}" for what, each in lists if len(each) > MOST_LISTED]
    if more:
        _say(f"and {', '.join(more)}: all are in the report in {report.out}")
    _print(" · ".join(_folder_summary(report)), err=True)


def _folder_summary(report: BatchReport) -> list[str]:
    from stylize.progress import duration

    counts = {
        "painted": len(report.painted),
        "done before": len(report.skipped),
        "failed": len(report.failed),
        "to be painted": len(report.left),
        "ignored": len(report.ignored),
    }
    parts = [", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing to do"]
    forecast = report.forecast
    if forecast is None:
        return [*parts, duration(report.seconds)]
    if forecast.seconds is not None:
        parts.append(f"at most about {duration(forecast.seconds)}")
    return [*parts, f"{report.workers or 'as many as fit'} × {gigabytes(forecast.bytes_per_worker)} of memory"]


# ---- around a run ---------------------------------------------------------------------------------------


class Watch:
    """Passes events on to `show`, writes snapshots beside `out`, and knows whether anything was painted."""

    def __init__(self, out: Path) -> None:
        self.show: Listener = lambda event: None
        self.painted = False
        self._out: Path | None = out  # None once a snapshot could not be written

    def __call__(self, event: Event) -> None:
        """Take one event."""
        from stylize.events import Evaluated, Snapshot

        self._tell(event)
        self.painted = self.painted or isinstance(event, Evaluated)
        if isinstance(event, Snapshot) and self._out is not None:
            self._save(event, snapshot_path(self._out, event.evaluation))

    def _tell(self, event: Event) -> None:
        try:
            self.show(event)
        except OSError:  # the terminal is gone, or nobody reads the pipe; the picture matters more
            self.show = lambda event: None

    def _save(self, event: Snapshot, path: Path) -> None:
        from stylize.events import Notice
        from stylize.images import save_picture

        try:
            save_picture(event.picture / 255, path, overwrite=True)
        except StylizeError as error:  # a full disk now may have room again for the result
            self._out = None
            self._tell(Notice(f"{error} No more snapshots will be saved."))


def snapshot_path(out: Path, evaluation: int) -> Path:
    """Where the picture of one evaluation goes: `result.000120.png` beside `result.png`."""
    return out.with_name(f"{out.stem}.{evaluation:06d}.png")


def _check_snapshots(out: Path, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse what snapshots would replace: without `overwrite` each other, and never a picture to paint from."""
    originals = {path.resolve() for path in inputs}
    for path in sorted(out.parent.glob(f"{glob.escape(out.stem)}.{'[0-9]' * 6}.png")):
        if path.resolve() in originals:
            raise OutputError(f"{path} is one of the pictures to paint from. Choose another --out.")
        if not overwrite:
            raise OutputError(f"{path} exists already. Choose another --out, or replace it with --overwrite.")


def _given(ctx: click.Context, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that stand on the command line."""
    given = {
        name: value
        for name, value in values.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    for kind in ("content", "style"):
        layers = given.get(f"{kind}_layers")
        if isinstance(layers, Layers):
            del given[f"{kind}_layers"]
            _add_layers(given, kind, layers)
    return given


def _add_layers(given: dict[str, Any], kind: str, layers: Layers) -> None:
    """Take apart what one option says of layers, beside the options that say a part of it."""
    said: dict[str, object] = {f"{kind}_layers": layers.names}
    said |= {} if layers.weights is None else {f"{kind}_layer_weights": layers.weights}
    said |= {} if layers.sources is None else {f"{kind}_layer_sources": layers.sources}
    for twice in said.keys() & given.keys():
        raise SettingsError(f"Say it in {flag(f'{kind}_layers')} or {flag(twice)}, not both.")
    given |= said


def _default_out(photo: Path | None, styles: Iterable[Path]) -> Path:
    return Path("_".join([photo.stem if photo else "texture", *(path.stem for path in styles)]) + ".png")


def _say_masks(config: str | None) -> None:
    """Remind of what a former result had besides its settings."""
    from stylize import images

    with contextlib.suppress(PictureError):  # no picture, or another program's
        if config is not None and Path(config).suffix.lower() in images.WRITE_FORMATS:
            for line in described(images.read_record(config)):
                _say(f"note: {config} was painted with {line}, which is no setting; give it again to repeat that.")


@contextlib.contextmanager
def _stoppable(watch: Watch) -> Iterator[None]:
    """SIGTERM and a closed terminal are as good as Ctrl-C; what comes out of here left no picture."""
    numbers = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    in_main_thread = threading.current_thread() is threading.main_thread()  # only there signals can be set
    taken = [number for number in numbers if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt as error:
        why = "again while the picture was being saved" if watch.painted else "before anything was painted"
        raise Interrupted(f"Interrupted {why}.") from error
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _saved_elsewhere(error: UnsavedError, out: Path) -> tuple[Result, str]:
    """The result, saved in the system's temporary folder, and what happened."""
    try:
        path = error.result.save(Path(tempfile.mkdtemp(prefix="stylize-")) / out.name)
    except (OSError, StylizeError) as second:
        raise SaveError(f"{error} It could not be saved in the temporary folder either: {second}") from error
    return dataclasses.replace(error.result, path=path), f"{error} The picture is in {path}."


# ---- what is said -----------------------------------------------------------------------------------


def _report(result: Result, trouble: str | None, *, quiet: bool, as_json: bool) -> int:
    """Say how the run ended; the exit code."""
    code = FAILED if trouble else EXIT_CODES[result.outcome]
    if not quiet:
        _say_summary(result)
    if trouble:
        _say(trouble)
    elif code != DONE:
        kept = f"The best picture so far is in {result.path}." if result.path else "Nothing was painted yet."
        _say(f"{result.reason} {kept}")
    if as_json:
        _print(json.dumps(_as_dict(result, trouble, code)))
    elif result.path and not quiet:
        _print(os.fsencode(result.path))  # a name need not be text
    return code


def _say_summary(result: Result) -> None:
    from stylize.progress import duration, figures

    if result.path is None:
        return
    height, width = result.tensor.shape[2:]
    errors = figures(result.losses, result.settings.normalization == "relative", suffix=" error")
    parts = [str(result.path), f"{width}×{height}", duration(result.seconds), ", ".join(errors)]
    _print(" · ".join(part for part in parts if part), err=True)


def _as_dict(result: Result, trouble: str | None, code: int) -> dict[str, Any]:
    """The report of a run, ready for JSON."""
    height, width = result.tensor.shape[2:]
    report = {
        "out": None if result.path is None else str(result.path),
        "size": [width, height],
        "losses": dict(result.losses),
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "outcome": result.outcome,
        "reason": result.reason,
        "notices": list(result.notices),
        "settings": result.settings.as_dict(),
        "exit_code": code,
    }
    return report | ({"error": trouble} if trouble else {})


def _described(record: Mapping[str, Any]) -> str:
    """A record as TOML: the settings that differ from the defaults, the rest as comments."""
    styles = " + ".join(style["name"] for style in record["styles"]) or "its regions' styles"
    lines = [
        f"{record['program']} {record['version']}: {_subject(record)} {styles}",
        f"{record['outcome']} after {record['evaluations']} evaluations",
        *described(record),
        f"VGG19 weights: {record['weights']['name']} (SHA-256 {record['weights']['sha256']})",
        *(f"{name}: {value:.6g}" for name, value in record["losses"].items()),
    ]
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + Settings.from_sources(record["settings"]).to_toml().rstrip()


def _subject(record: Mapping[str, Any]) -> str:
    return "a texture of" if record["content"] is None else f"{record['content']['name']} in the manner of"


def _say(message: str) -> None:
    _print(f"stylize: {message}".replace("\n", " "), err=True)


def _print(text: str | bytes, *, err: bool = False) -> None:
    """To standard output or error; that nobody reads it to the end is no error, a full disk behind it is.

    Raises:
        SaveError: when standard output cannot be written.
    """
    try:
        click.echo(text, err=err)
    except OSError as error:
        # What is still buffered would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), (sys.stderr if err else sys.stdout).fileno())
        if not err and not isinstance(error, BrokenPipeError):
            raise SaveError(f"Standard output cannot be written: {error.strerror}. The work is done.") from error

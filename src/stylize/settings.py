"""Every choice that a user can make, with its default: the one place of defaults.

A `Settings` is frozen and complete. It is made from the defaults, a preset or a TOML file, and single
values on top, in this order; `Settings.from_sources` does all three. Units stand in the names or beside
the field. docs/settings.md tells how the defaults were chosen.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from stylize.errors import SettingsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

StyleLoss: TypeAlias = Literal["centred", "gram", "meanstd", "w2", "histogram", "swd"]
Normalization: TypeAlias = Literal["relative", "johnson", "gatys"]
OptimizerName: TypeAlias = Literal["lbfgs", "adam", "torch-lbfgs"]
Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
Pooling: TypeAlias = Literal["max", "avg", "l2"]
Padding: TypeAlias = Literal["zeros", "replicate", "reflect"]
Quality: TypeAlias = Literal["draft", "good", "best"]
PreserveColor: TypeAlias = Literal["off", "luminance", "match"]
ColorMatch: TypeAlias = Literal["pca", "cholesky", "transport"]
Size: TypeAlias = "int | tuple[int, int] | Literal['full']"

# VGG19 by blocks: how many convolutions stand before each pooling (Simonyan and Zisserman 2015, table 1, E).
CONVOLUTIONS_PER_BLOCK = (2, 2, 4, 4, 4)
# In the place of content layers: those that suit `detail`, between these three.
BY_DETAIL: tuple[str, ...] = ("detail",)
_PAINTERLY, _MIDDLE, _PHOTOGRAPHIC = "relu5_2", "relu4_2", "relu3_2"

NAMED_STARTS = ("content", "noise", "style")  # what `Settings.init` can be besides a path
NAMED_WEIGHTS = ("embedded", "torchvision")  # what `Settings.weights` can be besides a path
MOST_SIDE = 100_000  # px; far more than any memory here holds, and a mistyped zero is refused
MOST_PAIRS = 1000  # of L-BFGS; a hundred already gain nothing
LEAST_MEMORY = 1_000_000_000  # bytes
MOST_MEMORY = 10**15
MOST_FLOAT = 3e38  # what float32 holds, in which the picture is computed

LAYERS: tuple[str, ...] = tuple(
    name
    for block, convolutions in enumerate(CONVOLUTIONS_PER_BLOCK, start=1)
    for name in (
        *(f"{kind}{block}_{i}" for i in range(1, convolutions + 1) for kind in ("conv", "relu")),
        f"pool{block}",
    )
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run's choices. Raises `SettingsError` on a value that cannot be."""

    # Size and effort
    # Long side of the result in pixels; "full" = the content's own; of a texture, its side, or (width, height)
    size: Size = 512
    upscale: bool = False  # may the result be larger than the content picture?
    quality: Quality = "good"  # when a scale is good enough to go on
    iterations: int | None = None  # evaluations over all scales; overrides the quality's own stop rule
    time_budget_s: float | None = None  # seconds for the optimisation; overrides the quality's stop rule
    scales: int | None = None  # how many sizes, each twice the one before; None = from about 128 px

    # What is asked of the picture
    content_weight: float = 0.2
    style_weight: float = 1.0
    tv_weight: float = 6.0  # on the mean 9-point total variation of the picture in [0, 1]
    detail: float = 0.5  # 0 … 1: how much of the content's detail is kept, by its layers and from scale to scale

    # What is measured of a picture
    content_layers: tuple[str, ...] = BY_DETAIL  # relu4_2 at the default `detail`
    content_layer_weights: tuple[float, ...] | None = None  # None = equal, or as `detail` says; the sum is free
    style_layers: tuple[str, ...] = ("relu1_1", "relu2_1", "relu3_1", "relu4_1", "relu5_1")
    style_layer_weights: tuple[float, ...] | None = (2.0, 2.0, 2.0, 3.0, 0.5)  # None = equal; the sum is free
    # Which style picture each style layer follows, from 1; 0, or None for all, = the blend of the pictures
    style_layer_sources: tuple[int, ...] | None = None
    style_loss: StyleLoss = "centred"
    normalization: Normalization = "relative"
    style_weights: tuple[float, ...] | None = None  # of several style pictures; None = equal; the sum is free
    style_scale: float = 1.0  # size of the style's strokes: its long side over the result's, at every scale
    preserve_color: PreserveColor = "off"  # keep CONTENT's colours: by painting lightness, or recolouring the style
    color_match: ColorMatch = "transport"  # how "match" recolours

    # How the picture is searched for
    init: str = "content"  # content, noise, style, or the path of a picture
    seed: int = 0
    optimizer: OptimizerName = "lbfgs"
    history: int = 10  # curvature pairs that L-BFGS remembers
    history_precision: Precision = "auto"  # of those pairs; auto = fp32, unless a plan of the memory chose bf16
    step_levels: float | None = None  # first step of L-BFGS, every step of Adam, in grey levels of 255
    range_weight: float = 30.0  # of the mean square excess over [0, 1], which a file cannot hold
    clip_norm: float | None = None  # guard on the norm of the picture's gradient
    clip_value: float | None = None  # guard on each value of the picture's gradient
    normalize_gradients: bool = False  # is each loss's gradient given an L1 norm of its weight, at its own layer?

    # The network and the machine
    weights: str = "embedded"  # embedded, torchvision, or the path of a state dict
    weights_normalization: Literal["caffe", "torchvision"] | None = None  # of a state dict from a file
    pooling: Pooling = "max"
    padding: Padding = "zeros"  # of the first layer
    precision: Precision = "auto"
    memory_limit: int | None = None  # bytes, or a text as "6GB"; None = most of what is free
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    checkpoint_every_s: float = 120.0  # seconds between two checkpoints, where there is a folder for them

    def __post_init__(self) -> None:
        """Turn lists into tuples and paths into text, then refuse what cannot be."""
        for name, value in vars(self).items():
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
            elif isinstance(value, Path):
                object.__setattr__(self, name, str(value))
        limit: object = self.memory_limit
        if isinstance(limit, str):
            object.__setattr__(self, "memory_limit", parse_bytes(limit))
        self._fill_in()
        _check_kinds(self)
        _check_choices(self)
        _check_numbers(self)
        _check_layers(self)
        _check_pairs(self)

    def _fill_in(self) -> None:
        """Say in full what was left to be chosen."""
        if self.content_layers == BY_DETAIL and _is_share(self.detail):
            layers = layers_by_detail(self.detail)
            object.__setattr__(self, "content_layers", tuple(layers))
            if self.content_layer_weights is None:
                object.__setattr__(self, "content_layer_weights", tuple(layers.values()))
        for kind in ("content", "style"):
            layers_named = getattr(self, f"{kind}_layers")
            if getattr(self, f"{kind}_layer_weights") is None and isinstance(layers_named, tuple):
                object.__setattr__(self, f"{kind}_layer_weights", (1.0,) * len(layers_named))

    @classmethod
    def from_sources(
        cls, config: str | Path | Mapping[str, Any] | None = None, **overrides: Any
    ) -> Settings:
        """Defaults < `config` (a preset's name, a TOML file or a mapping) < `overrides`.

        An override of `...` is as good as none, so that a caller can hand over all the flags it has.

        Raises:
            SettingsError: for an unknown name or a value that cannot be.
        """
        chosen = dict(config) if isinstance(config, Mapping) else load_config(config) if config else {}
        given = {name: value for name, value in overrides.items() if value is not ...}
        chosen = _merged(_merged({}, chosen), given)
        _check_names(chosen, where="" if isinstance(config, Mapping) or not config else f" (from {config})")
        return cls(**chosen)

    def replace(self, **changes: Any) -> Settings:
        """Return a copy with some values changed and all of them checked again."""
        _check_names(changes, where="")
        return Settings(**_merged(vars(self), changes))

    @property
    def whole_picture_only(self) -> str | None:
        """What of these choices cannot be had in tiles, and why: a sentence; None when all can be."""
        if self.style_loss in _SORTING:
            return f"style_loss {self.style_loss!r} sorts the values of a whole layer."
        if self.normalize_gradients:
            return "normalize_gradients needs the gradient of a whole layer at once."
        return None

    def as_dict(self) -> dict[str, Any]:
        """All values, ready for JSON."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """The values that differ from the defaults, as TOML that `load_config` reads."""
        defaults = vars(Settings(detail=self.detail)) | {"detail": Settings().detail}
        changed = {name: value for name, value in vars(self).items() if value != defaults[name]}
        # JSON's strings, numbers, booleans and flat lists are TOML's too, but for the delete character; None,
        # which TOML has no word for, is the default wherever it can stand.
        return "".join(
            f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in changed.items()
        ).replace("\x7f", "\\u007f")


def preset_names() -> list[str]:
    """The names that `--config` knows."""
    return sorted(path.name[: -len(".toml")] for path in _preset_folder().iterdir() if path.name.endswith(".toml"))


def preset_summary(name: str) -> str:
    """What a preset is for: the first line of its file, which is a comment."""
    text: str = (_preset_folder() / f"{name}.toml").read_text(encoding="utf-8")
    return text.partition("\n")[0].removeprefix("#").strip()


def load_config(source: str | Path) -> dict[str, Any]:
    """Read the settings of a preset, by its name, or of a TOML file.

    Raises:
        SettingsError: when there is no such preset or file, or it is not TOML.
    """
    path = Path(source)
    if str(source) in preset_names():
        text = (_preset_folder() / f"{source}.toml").read_text(encoding="utf-8")
    elif os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a name that is too long
        try:
            text = path.read_text(encoding="utf-8-sig")  # Windows editors begin with a mark
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} cannot be read as a TOML file: {error}") from error
    else:
        raise SettingsError(
            f"{source!s} is neither a preset ({', '.join(preset_names())}) nor a file of settings."
        )
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}. See configs/gatys2016.toml for an example.") from error


def parse_bytes(text: str) -> int:
    """A size in bytes from a text such as 6GB, 1.5 GiB or 800000000.

    Raises:
        SettingsError: when it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(i?)([bB]?)", text.strip())
    if match is None:
        raise SettingsError(f"memory_limit is {text!r}, which is no size of memory; write it as 6GB or 1.5GiB.")
    number, prefix, binary, _ = match.groups()
    count = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " ")
    _check_memory(count, text if len(text) < 20 else f"{text[:16]}…")
    return int(count)


def _check_memory(count: float, text: str) -> None:
    if not LEAST_MEMORY <= count <= MOST_MEMORY:
        raise SettingsError(
            f"memory_limit is {text}; it must be from {gigabytes(LEAST_MEMORY)}, most of which PyTorch and the "
            f"network take for themselves, to {gigabytes(MOST_MEMORY)}. Write it as 6GB."
        )


def gigabytes(count: float) -> str:
    """Bytes in words: `3.2 GB`."""
    return f"{count / 1e9:.1f} GB"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean …?` for a misspelt word, or nothing when no known word is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def _preset_folder() -> Any:
    """The presets in the installed package, or in the source tree when it runs from there."""
    installed = resources.files("stylize") / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def layers_by_detail(detail: float) -> dict[str, float]:
    """The content layers that suit a `detail` in [0, 1], and their weights, which sum to 1.

    Deep layers know what is in a picture and leave its look to the brush; shallow ones know the look itself.
    """
    share = 2 * detail if detail < 0.5 else 2 * detail - 1
    deep, shallow = (_PAINTERLY, _MIDDLE) if detail < 0.5 else (_MIDDLE, _PHOTOGRAPHIC)
    return {layer: weight for layer, weight in ((deep, 1 - share), (shallow, share)) if weight}


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`before` with `changes` on top, without what was only said of other layers.

    Layers that are named anew count alike and style layers follow the blend. Content layers that suit the
    `detail` before suit the new one, too.
    """
    passed: dict[str, Any] = {}
    if "style_layers" in changes:
        passed |= {"style_layer_weights": None, "style_layer_sources": None}
    if "content_layers" in changes:
        passed |= {"content_layer_weights": None}
    elif "detail" in changes and _suit_detail(before):
        passed |= {"content_layers": BY_DETAIL, "content_layer_weights": None}
    return {**before, **passed, **changes}


def _suit_detail(chosen: Mapping[str, Any]) -> bool:
    detail, layers = chosen.get("detail", _default("detail")), chosen.get("content_layers")
    weights = chosen.get("content_layer_weights")
    if not _is_share(detail) or not isinstance(layers, (list, tuple)) or not isinstance(weights, (list, tuple)):
        return False
    suitable = layers_by_detail(detail)
    return [*layers] == [*suitable] and [*weights] == [*suitable.values()]


def _check_names(chosen: Iterable[str], *, where: str) -> None:
    known = [field.name for field in dataclasses.fields(Settings)]
    for name in chosen:
        if name not in known:
            raise SettingsError(f"There is no setting {name!r}{where}.{did_you_mean(name, known)}")


_SORTING = ("histogram", "swd")  # style losses that are not made of sums over places

_TEXTS = ("init", "weights", "device")
_LISTS = (
    *("content_layers", "content_layer_weights"),
    *("style_layers", "style_layer_weights", "style_layer_sources", "style_weights"),
)


def _check_kinds(settings: Settings) -> None:
    for name in _TEXTS:
        value: object = getattr(settings, name)
        if not isinstance(value, str) or not value:
            raise SettingsError(f"{name} is {value!r}; it must be a text such as {_default(name)!r}.")
    for name in _LISTS:
        value = getattr(settings, name)
        if not isinstance(value, tuple) and (value is not None or name.endswith("layers")):
            raise SettingsError(f"{name} is {value!r}; it must be a list, also for a single value.")
    for name in ("upscale", "normalize_gradients"):
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise SettingsError(f"{name} is {value!r}; it can be true or false.")
    if settings.weights_normalization not in (None, "caffe", "torchvision"):
        raise SettingsError(
            f"weights_normalization is {settings.weights_normalization!r}; it can be caffe or torchvision."
        )


def _default(name: str) -> object:
    return Settings.__dataclass_fields__[name].default


_CHOICES: dict[str, tuple[str, ...]] = {
    "quality": get_args(Quality),
    "style_loss": get_args(StyleLoss),
    "normalization": get_args(Normalization),
    "optimizer": get_args(OptimizerName),
    "precision": get_args(Precision),
    "history_precision": get_args(Precision),
    "pooling": get_args(Pooling),
    "padding": get_args(Padding),
    "preserve_color": get_args(PreserveColor),
    "color_match": get_args(ColorMatch),
}
CHOICES: Mapping[str, tuple[str, ...]] = _CHOICES


def _check_choices(settings: Settings) -> None:
    for name, choices in CHOICES.items():
        value = getattr(settings, name)
        if value not in choices:
            raise SettingsError(
                f"{name} is {value!r}; it can be {', '.join(choices)}.{did_you_mean(str(value), choices)}"
            )


# name: (smallest allowed value, is that value itself allowed, must it be a whole number)
_NUMBERS: dict[str, tuple[float, bool, bool]] = {
    "iterations": (1, True, True),
    "time_budget_s": (0, False, False),
    "scales": (1, True, True),
    "content_weight": (0, True, False),
    "style_weight": (0, True, False),
    "tv_weight": (0, True, False),
    "detail": (0, True, False),
    "style_scale": (0, False, False),
    "seed": (0, True, True),
    "history": (1, True, True),
    "step_levels": (0, False, False),
    "range_weight": (0, True, False),
    "clip_norm": (0, False, False),
    "clip_value": (0, False, False),
    "checkpoint_every_s": (0, False, False),
    "memory_limit": (0, True, True),
}


def _check_numbers(settings: Settings) -> None:
    for name, (least, inclusive, whole) in _NUMBERS.items():
        value = getattr(settings, name)
        if value is None and _default(name) is None:
            continue
        kind = "a whole number" if whole else "a number"
        bound = f"of at least {least:g}" if inclusive else f"above {least:g}"
        if not _is_number(value, whole) or value < least or (value == least and not inclusive):
            raise SettingsError(f"{name} is {value!r}; it must be {kind} {bound}.")
    if settings.memory_limit is not None:
        _check_memory(settings.memory_limit, str(settings.memory_limit))
    if settings.seed >= 2**64:
        raise SettingsError(f"seed is {settings.seed}; it must be below 2**64.")
    if settings.history > MOST_PAIRS:
        raise SettingsError(f"history is {settings.history}; more than {MOST_PAIRS} pairs only cost memory.")
    if settings.detail > 1:
        raise SettingsError(f"detail is {settings.detail!r}; it goes from 0 (painterly) to 1 (photographic).")
    _check_size(settings.size)


def _check_size(size: Any) -> None:
    sides = size if isinstance(size, tuple) and len(size) == 2 else (size,)
    if size != "full" and not all(_is_number(side, whole=True) and 16 <= side <= MOST_SIDE for side in sides):
        raise SettingsError(
            f"size is {size!r}; it must be a whole number of pixels from 16 to {MOST_SIDE}, or 'full', "
            "or two such numbers, the width and height of a texture."
        )


def _is_share(value: object) -> bool:
    return _is_number(value, whole=False) and 0 <= value <= 1  # type: ignore[operator]


def _is_number(value: object, whole: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return abs(value) <= (sys.float_info.max if whole else MOST_FLOAT)


def _check_layers(settings: Settings) -> None:
    for name in ("content_layers", "style_layers"):
        layers = getattr(settings, name)
        for layer in layers:
            if layer not in LAYERS:
                raise SettingsError(
                    f"{name}: there is no layer {layer!r}.{did_you_mean(str(layer), LAYERS)} "
                    "Layers are conv1_1 … conv5_4, relu1_1 … relu5_4 and pool1 … pool5."
                )
        if len(set(layers)) != len(layers):
            raise SettingsError(f"{name}: a layer is named twice in {', '.join(layers)}.")
    if not settings.style_layers and not settings.content_layers:
        raise SettingsError("Neither a content nor a style layer is named: there is nothing to paint.")
    for name, count, what in (
        ("content_layer_weights", len(settings.content_layers), "content layers"),
        ("style_layer_weights", len(settings.style_layers), "style layers"),
        ("style_weights", None, "style pictures"),
    ):
        weights = getattr(settings, name)
        if weights is None or (count == 0 and not weights):
            continue
        valid = all(_is_number(weight, whole=False) and weight >= 0 for weight in weights)
        if not valid or not 0 < sum(weights) <= sys.float_info.max:
            raise SettingsError(f"{name} is {weights}; weights are numbers of at least 0, one of them above 0.")
        if count is not None and len(weights) != count:
            raise SettingsError(f"{name} has {len(weights)} values for {count} {what}; give one for each.")
    _check_sources(settings.style_layer_sources, len(settings.style_layers))


def _check_sources(sources: tuple[int, ...] | None, layers: int) -> None:
    if sources is None:
        return
    if not all(_is_number(source, whole=True) and source >= 0 for source in sources):
        raise SettingsError(
            f"style_layer_sources is {sources}; it holds the numbers of style pictures, from 1, or 0 for the blend."
        )
    if len(sources) != layers:
        raise SettingsError(
            f"style_layer_sources has {len(sources)} values for {layers} style layers; give one for each."
        )


def _check_pairs(settings: Settings) -> None:
    if settings.content_weight == settings.style_weight == 0:
        raise SettingsError("content_weight and style_weight are both 0: there is nothing to paint.")
    if settings.normalization != "relative" and settings.style_loss != "gram":
        raise SettingsError(
            f"normalization {settings.normalization!r} is defined for the plain Gram matrix only; "
            "add style_loss 'gram', or leave normalization at 'relative'."
        )

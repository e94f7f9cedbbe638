"""Rotary settings, read from config.json in either spelling (torch-free).

Two spellings exist: ``rope_theta`` beside ``rope_scaling`` (releases), and one ``rope_parameters``
object (transformers 5), which some families nest by layer type.
"""

import math
from dataclasses import dataclass
from typing import Literal

from vllm.model_executor.models.config_fields import FieldReader

RopeKind = Literal["default", "linear", "llama3", "yarn", "divided", "proportional"]
_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn", "divided")

# Phi's, which are "divided" by one of two lists.
_LONG_KINDS = ("longrope", "su")
_ORIGINAL_LENGTH = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn queries and keys.

    Attributes:
        theta: Base of the frequencies.
        dim: Values of a head that are turned.
        kind: How frequencies are stretched to longer contexts.
        factor: By how much; 1 for "default".
        original_length: Tokens of the context that was trained first ("llama3", "yarn").
        low, high: "llama3": wavelengths below original_length / high are left alone, those above
            original_length / low are stretched. "yarn": the same by turns, beta_slow and beta_fast.
        truncates: "yarn": whether the ramp's ends are rounded to whole pairs.
        magnitude: Queries and keys are scaled by it ("yarn").
        divisors: "divided": one of each frequency, as GGUF files give them.
        sections: How many pairs are turned by each of three positions (token, row, column), in
            turns of three; empty: all by one.
        num_turned: "proportional": pairs that are turned, by the first frequencies of the whole
            width's; the others stand still.
    """

    theta: float
    dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_length: int = 0
    low: float = 0.0
    high: float = 0.0
    truncates: bool = True
    magnitude: float = 1.0
    divisors: tuple[float, ...] = ()
    num_turned: int = 0
    sections: tuple[int, ...] = ()

    @property
    def axis_of_pair(self) -> tuple[int, ...]:
        """Which of three positions turns each pair: 0, 1, 2, 0, ... while a section lasts."""
        axes = [0] * (self.dim // 2)
        for axis, count in enumerate(self.sections[1:], start=1):
            for pair in range(axis, min(3 * count, len(axes)), 3):
                axes[pair] = axis
        return tuple(axes)


def read_rope(
    fields: FieldReader, dim: int, theta: float, default_share: float | None = None
) -> RopeConfig:
    """Reads a model's one rotary setting.

    Args:
        fields: config.json, or its text part.
        dim: Values of a head.
        theta: Base where the file gives none.
        default_share: Where the family turns the first values of a head only, what share of them;
            None: it turns all.

    Raises:
        ConfigError: A kind or value that is not supported; the message names it.
    """
    scaling = find_rope_object(fields)
    if fields.has("rope_parameters"):
        check_one_spelling(fields, scaling)
    if not scaling.has("rope_theta"):
        theta = fields.number("rope_theta", theta)
    _refuse_two_lengths(fields, scaling)
    return read_rope_object(scaling, dim, theta, fields, default_share)


def find_rope_object(fields: FieldReader) -> FieldReader:
    """Returns the object of a model's one rotary setting, in the spelling that the file has."""
    return fields.sub_reader("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")


def find_original_length(scaling: FieldReader, fields: FieldReader) -> int:
    """Returns the tokens of the context that was trained first; 0: neither place gives it.

    Args:
        scaling: The object of rotary settings.
        fields: config.json around it; some files have the length there.
    """
    for place in (scaling, fields):
        if place.has(_ORIGINAL_LENGTH):
            return place.positive_int(_ORIGINAL_LENGTH)
    return 0


def _refuse_two_lengths(fields: FieldReader, scaling: FieldReader) -> None:
    """Refuses a length beside the rotary object that is not the one inside.

    Raises:
        ConfigError: They differ.
    """
    if fields.has(_ORIGINAL_LENGTH) and scaling.has(_ORIGINAL_LENGTH):
        outer = fields.positive_int(_ORIGINAL_LENGTH)
        said = scaling.positive_int(_ORIGINAL_LENGTH)
        if outer != said:
            allowed = f"{said}, which the rotary settings say: give one of the two"
            raise fields.error(_ORIGINAL_LENGTH, outer, allowed)


def read_rope_by_kind(fields: FieldReader, kinds: tuple[str, ...]) -> FieldReader:
    """Returns the ``rope_parameters`` of a family that nests them by kind of layer.

    Args:
        fields: config.json, or its text part.
        kinds: Kinds of layers that the family has.

    Raises:
        ConfigError: The object holds settings beside those of the kinds, which no layer would have.
    """
    for name, value in fields.mapping("rope_parameters").items():
        if name not in kinds and value is not None:
            raise fields.error(f"rope_parameters.{name}", value, f"objects for {', '.join(kinds)}")
    return fields.sub_reader("rope_parameters")


def check_one_spelling(fields: FieldReader, parameters: FieldReader) -> None:
    """Refuses the older spelling beside ``rope_parameters`` where it says something else.

    Both come together where the older one is given to override a file of the newer one.

    Args:
        fields: config.json, or its text part.
        parameters: The object of ``rope_parameters`` that the older spelling is about.

    Raises:
        ConfigError: They differ; the message names the field.
    """
    fields.refuse_other_spelling("rope_scaling", parameters)
    if parameters.has("rope_theta"):
        refuse_other_theta(fields, "rope_theta", parameters.number("rope_theta"))


def refuse_other_theta(fields: FieldReader, name: str, said: float) -> None:
    """Refuses a base beside ``rope_parameters`` that is not the one that layers use.

    Args:
        fields: config.json, or its text part.
        name: The field with the base.
        said: What layers use.

    Raises:
        ConfigError: They differ.
    """
    if fields.has(name) and fields.number(name) != said:
        allowed = f"{said!r}, which rope_parameters says: give one of the two"
        raise fields.error(name, fields.number(name), allowed)


def read_rope_object(
    scaling: FieldReader,
    dim: int,
    theta: float,
    fields: FieldReader,
    default_share: float | None = None,
) -> RopeConfig:
    """Reads one object of rotary settings; an empty one means "default".

    Args:
        scaling: The object.
        dim: Values of a head.
        theta: Base where the object gives none.
        fields: config.json around it, for lengths.
        default_share: As for ``read_rope``.

    Raises:
        ConfigError: As ``read_rope``.
    """
    theta = scaling.number("rope_theta", theta)
    # Older files say "type".
    key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.text(key, "default")
    dim = _read_turned(scaling, dim, fields, default_share)
    if kind == "default":
        return RopeConfig(theta, dim)
    if kind == "linear":
        return RopeConfig(theta, dim, "linear", scaling.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            dim,
            "llama3",
            scaling.number("factor"),
            find_original_length(scaling, fields) or scaling.positive_int(_ORIGINAL_LENGTH),
            scaling.number("low_freq_factor"),
            scaling.number("high_freq_factor"),
        )
    if kind == "yarn":
        return _read_yarn(scaling, dim, theta, fields)
    if kind == "divided":
        divisors = scaling.sequence("divisors", dim // 2)
        return RopeConfig(theta, dim, "divided", divisors=tuple(float(value) for value in divisors))
    if kind in _LONG_KINDS:
        return _read_long(scaling, dim, theta, fields)
    raise scaling.error(key, kind, f"one of {', '.join(_KINDS)}, {_LONG_KINDS[0]}")


def _read_long(scaling: FieldReader, dim: int, theta: float, fields: FieldReader) -> RopeConfig:
    """Reads divisors for contexts up to the first length and beyond: those of the whole context."""
    length = find_original_length(scaling, fields) or scaling.positive_int(_ORIGINAL_LENGTH)
    longest = fields.positive_int("max_position_embeddings", length)
    name = "long_factor" if longest > length else "short_factor"
    divisors = tuple(float(value) for value in scaling.sequence(name, dim // 2))
    if not all(0 < value < float("inf") for value in divisors):
        raise scaling.error(name, divisors, "numbers above 0")
    stretch = scaling.number("factor", longest / length)
    magnitude = math.sqrt(1 + math.log(stretch) / math.log(length)) if stretch > 1 else 1.0
    magnitude = scaling.number("attention_factor", magnitude)
    return RopeConfig(theta, dim, "divided", divisors=divisors, magnitude=magnitude)


def _read_turned(
    scaling: FieldReader, dim: int, fields: FieldReader, default_share: float | None
) -> int:
    """Returns how many values of a head are turned."""
    source = scaling if scaling.has("partial_rotary_factor") else fields
    share = source.number("partial_rotary_factor", default_share or 1.0)
    # A share beyond the head, however large, is refused below.
    turned = int(dim * min(share, 2.0))
    if default_share is None:
        if share != 1.0:
            raise source.error("partial_rotary_factor", share, "1.0")
    elif not 0 < turned <= dim or turned % 2:
        raise source.error(
            "partial_rotary_factor", share, f"a share of {dim} that is an even number"
        )
    return turned


def _read_yarn(scaling: FieldReader, dim: int, theta: float, fields: FieldReader) -> RopeConfig:
    length = find_original_length(scaling, fields) or fields.positive_int("max_position_embeddings")
    # Some releases give the two lengths instead.
    longest = fields.positive_int("max_position_embeddings", length)
    factor = scaling.number("factor", longest / length)
    if scaling.has("attention_factor"):
        magnitude = scaling.number("attention_factor")
    elif scaling.has("mscale") and scaling.has("mscale_all_dim"):
        magnitude = _yarn_magnitude(factor, scaling.number("mscale")) / _yarn_magnitude(
            factor, scaling.number("mscale_all_dim")
        )
    else:
        magnitude = _yarn_magnitude(factor, 1.0)
    return RopeConfig(
        theta,
        dim,
        "yarn",
        factor,
        length,
        scaling.number("beta_slow", 1.0),
        scaling.number("beta_fast", 32.0),
        scaling.boolean("truncate", True),
        magnitude,
    )


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

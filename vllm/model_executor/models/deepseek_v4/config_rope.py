"""Rotary settings of DeepSeek-V4, read from either spelling (torch-free).

Published: ``rope_theta``, ``compress_rope_theta`` and one ``rope_scaling`` that concerns only the
layers with a compressor. transformers: ``rope_parameters`` with a "main" and a "compress" object.
"""

from dataclasses import dataclass

from vllm.model_executor.models.config_fields import FieldReader

_MAIN_THETA = 10_000.0
_COMPRESS_THETA = 160_000.0


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN frequency interpolation; there is no magnitude factor in this architecture."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base and scaling of one rotary table.

    Attributes:
        theta: Base of the geometric series of frequencies.
        yarn: Interpolation applied at every length, or None.
    """

    theta: float
    yarn: YarnConfig | None = None


def read_rope_configs(fields: FieldReader) -> tuple[RopeConfig, RopeConfig]:
    """Returns the settings of window-only layers and of layers with a compressor.

    Raises:
        ConfigError: An unknown scaling type or a bad number.
    """
    if fields.has("rope_parameters"):
        both = fields.sub_reader("rope_parameters")
        main, compress = both.sub_reader("main"), both.sub_reader("compress")
        fields.refuse_other_spelling("rope_scaling", compress)
        return (
            RopeConfig(main.number("rope_theta", _MAIN_THETA), _read_yarn(main)),
            RopeConfig(compress.number("rope_theta", _COMPRESS_THETA), _read_yarn(compress)),
        )
    return (
        RopeConfig(fields.number("rope_theta", _MAIN_THETA)),
        RopeConfig(
            fields.number("compress_rope_theta", _COMPRESS_THETA),
            _read_yarn(fields.sub_reader("rope_scaling")),
        ),
    )


def _read_yarn(fields: FieldReader) -> YarnConfig | None:
    name = "rope_type" if fields.has("rope_type") else "type"
    kind = fields.text(name, "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise fields.error(name, kind, "'default' or 'yarn'")
    fields.require("attention_factor", 1.0, (1.0,))
    return YarnConfig(
        factor=fields.number("factor"),
        original_max_position_embeddings=fields.positive_int("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
    )

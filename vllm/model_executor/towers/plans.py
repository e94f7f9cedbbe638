"""What towers look like, as data, and which tensors they read (torch-free).

    pixels [H, W, 3] --tower--> rows [soft tokens, width of the model's stream]

Names of tensors are those of the files without ``model.`` in front, see ``TowerPlan.own_name``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from vllm.model_executor.towers.encoder import EncoderPlan, LayerNames
from vllm.multimodal.families import ImageFamily

Shape = tuple[int, ...]
QWEN_EPS = 1e-6
"""Of the norms of Qwen's tower."""

BothWays = Literal["nowhere", "windows", "everywhere"]
"""In which layers the rows of one picture see each other both ways."""


class TowerPlan(Protocol):
    """A tower's sizes.

    Attributes:
        kind: Which of the towers it is.
        prefixes: How the names of its tensors begin.
        out_width: Of its rows, and of the model's stream.
    """

    @property
    def kind(self) -> str: ...

    @property
    def prefixes(self) -> tuple[str, ...]: ...

    @property
    def out_width(self) -> int: ...

    def own_name(self, name: str) -> str:
        """Return a tensor's name here, of that in a file."""

    def tensors(self) -> Mapping[str, Shape]:
        """Return the shapes of all tensors that it reads."""

    def encoder(self) -> EncoderPlan | None:
        """Return its layers; None: it has none."""


@dataclass(frozen=True, slots=True)
class ImagesPlan:
    """How a model sees pictures.

    Attributes:
        family: Sizes of pictures and their text in a prompt.
        tower: What makes rows of them.
        both_ways: In which layers the rows of one picture see each other both ways.
        input_token_id: Whose row of a table of layers' inputs stands in the place of a picture's.
        longest: Soft tokens of the largest picture that is served; 0: any that the family knows.
    """

    family: ImageFamily
    tower: TowerPlan
    both_ways: BothWays = "nowhere"
    input_token_id: int = 0
    longest: int = 0


def _strip(name: str, *prefixes: str) -> str:
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


@dataclass(frozen=True, slots=True)
class SiglipPlan:
    """Gemma 3's: SigLIP over a square picture, its patches pooled to soft tokens.

    Attributes:
        width, inner: Of the stream and of the MLP.
        patch: Pixels of both sides of a patch.
        patches_a_side: Patches of both sides of the picture.
        tokens_a_side: Soft tokens likewise.
        out_width: Of the model's stream.
        eps: Of all norms.
    """

    num_layers: int
    width: int
    inner: int
    num_heads: int
    patch: int
    patches_a_side: int
    tokens_a_side: int
    out_width: int
    eps: float
    kind: Literal["siglip"] = "siglip"
    prefixes: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")

    def own_name(self, name: str) -> str:
        """See TowerPlan; some writers put ``vision_model.`` inside."""
        name = _strip(name, "model.")
        return name.replace("vision_tower.vision_model.", "vision_tower.")

    def tensors(self) -> Mapping[str, Shape]:
        """See TowerPlan."""
        d, f = self.width, self.inner
        named: dict[str, Shape] = {
            "vision_tower.embeddings.patch_embedding.weight": (d, 3, self.patch, self.patch),
            "vision_tower.embeddings.patch_embedding.bias": (d,),
            "vision_tower.embeddings.position_embedding.weight": (self.patches_a_side**2, d),
            "vision_tower.post_layernorm.weight": (d,),
            "vision_tower.post_layernorm.bias": (d,),
            "multi_modal_projector.mm_soft_emb_norm.weight": (d,),
            "multi_modal_projector.mm_input_projection_weight": (d, self.out_width),
        }
        for layer in range(self.num_layers):
            prefix = f"vision_tower.encoder.layers.{layer}"
            linears = {f"self_attn.{part}": (d, d) for part in _SIGLIP_PARTS}
            linears |= {"mlp.fc1": (f, d), "mlp.fc2": (d, f)}
            named |= _with_bias(prefix, linears)
            for norm in ("layer_norm1", "layer_norm2"):
                named |= {f"{prefix}.{norm}.weight": (d,), f"{prefix}.{norm}.bias": (d,)}
        return named

    def encoder(self) -> EncoderPlan:
        """See TowerPlan."""
        queries, keys, values, output = (f"self_attn.{part}" for part in _SIGLIP_PARTS)
        norms = ("layer_norm1", "layer_norm2")
        names = LayerNames(norms, queries, keys, values, output, "mlp.fc1", "mlp.fc2")
        head_dim = self.width // self.num_heads
        return EncoderPlan(
            "vision_tower.encoder.layers",
            names,
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            eps=self.eps,
            norm="layer",
        )


_SIGLIP_PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")


def _with_bias(prefix: str, linears: Mapping[str, Shape]) -> dict[str, Shape]:
    named: dict[str, Shape] = {}
    for name, shape in linears.items():
        named[f"{prefix}.{name}.weight"] = shape
        named[f"{prefix}.{name}.bias"] = shape[:1]
    return named


@dataclass(frozen=True, slots=True)
class Gemma4TowerPlan:
    """Gemma 4's: gated layers between norms, positions turned by axis, patches pooled.

    Attributes:
        width, inner: Of the stream and of the MLP.
        patch: Pixels of both sides of a patch.
        pooling: Patches of both sides of a soft token.
        num_positions: Rows of the table of positions, per axis.
        out_width: Of the model's stream.
        theta: Base of the frequencies by which queries and keys are turned.
        eps: Of all norms.
        is_clipped: Whether what goes in and out of each product is clamped to stored bounds.
        is_standardised: Whether pooled rows are shifted and scaled by stored vectors.
    """

    num_layers: int
    width: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    patch: int
    pooling: int
    num_positions: int
    out_width: int
    theta: float
    eps: float
    is_clipped: bool
    is_standardised: bool
    kind: Literal["gemma4"] = "gemma4"
    prefixes: tuple[str, ...] = ("vision_tower.", "embed_vision.")

    def own_name(self, name: str) -> str:
        """See TowerPlan."""
        return _strip(name, "model.")

    def tensors(self) -> Mapping[str, Shape]:
        """See TowerPlan."""
        d, f, own = self.width, self.inner, self.num_heads * self.head_dim
        shared = self.num_kv_heads * self.head_dim
        embedder = "vision_tower.patch_embedder"
        named: dict[str, Shape] = {
            f"{embedder}.input_proj.weight": (d, 3 * self.patch**2),
            f"{embedder}.position_embedding_table": (2, self.num_positions, d),
            "embed_vision.embedding_projection.weight": (self.out_width, d),
        }
        if self.is_standardised:
            named |= {"vision_tower.std_bias": (d,), "vision_tower.std_scale": (d,)}
        linears = {
            "self_attn.q_proj": (own, d),
            "self_attn.k_proj": (shared, d),
            "self_attn.v_proj": (shared, d),
            "self_attn.o_proj": (d, own),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        norms = {f"{name}.weight": (d,) for name in GEMMA4_NORMS}
        norms |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        for layer in range(self.num_layers):
            prefix = f"vision_tower.encoder.layers.{layer}"
            named |= {f"{prefix}.{name}": shape for name, shape in norms.items()}
            for name, shape in linears.items():
                named[f"{prefix}.{name}.linear.weight"] = shape
                if self.is_clipped:
                    named |= {f"{prefix}.{name}.{bound}": () for bound in CLIP_BOUNDS}
        return named

    def encoder(self) -> EncoderPlan:
        """See TowerPlan."""
        queries, keys, values, output = (f"self_attn.{part}_proj" for part in "qkvo")
        names = LayerNames(
            GEMMA4_NORMS,
            queries,
            keys,
            values,
            output,
            up="mlp.up_proj",
            down="mlp.down_proj",
            gate="mlp.gate_proj",
            query_norm="self_attn.q_norm",
            key_norm="self_attn.k_norm",
        )
        return EncoderPlan(
            "vision_tower.encoder.layers",
            names,
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=1.0,
            eps=self.eps,
            norm="rms",
            norms_values=True,
            num_turned_parts=2,
        )


GEMMA4_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True)
class Gemma4EmbedderPlan:
    """Gemma 4 12B's, which has no layers: a cell of pixels, two products and a position.

    Attributes:
        width: Between the products.
        cell: Pixels of both sides of a soft token.
        num_positions: Rows of the table of positions.
        out_width: Of the model's stream.
        eps: Of the last norm.
    """

    width: int
    cell: int
    num_positions: int
    out_width: int
    eps: float
    kind: Literal["gemma4_embedder"] = "gemma4_embedder"
    prefixes: tuple[str, ...] = ("vision_embedder.", "embed_vision.")

    def own_name(self, name: str) -> str:
        """See TowerPlan; transformers' own names put all in ``embed_vision``."""
        name = _strip(name, "model.").replace("embed_vision.multimodal_embedder.", "embed_vision.")
        if name.startswith(("embed_vision.patch_", "embed_vision.pos_")):
            return name.replace("embed_vision.", "vision_embedder.")
        return name

    def tensors(self) -> Mapping[str, Shape]:
        """See TowerPlan."""
        d, inputs = self.width, 3 * self.cell**2
        prefix = "vision_embedder"
        named = _with_bias(prefix, {"patch_dense": (d, inputs)})
        for norm, width in (("patch_ln1", inputs), ("patch_ln2", d), ("pos_norm", d)):
            named |= {f"{prefix}.{norm}.weight": (width,), f"{prefix}.{norm}.bias": (width,)}
        return {
            **named,
            f"{prefix}.pos_embedding": (self.num_positions, 2, d),
            "embed_vision.embedding_projection.weight": (self.out_width, d),
        }

    def encoder(self) -> None:
        """See TowerPlan."""
        return


@dataclass(frozen=True, slots=True)
class QwenTowerPlan:
    """Qwen 3.5's: plain layers over patches in blocks, each block one soft token.

    Attributes:
        width, inner: Of the stream and of the MLP.
        patch: Pixels of both sides of a patch.
        num_frames: Frames of a patch, which a picture fills with itself.
        merge: Patches of both sides of a soft token.
        positions_a_side: The table of positions is a square of so many.
        out_width: Of the model's stream.
    """

    num_layers: int
    width: int
    inner: int
    num_heads: int
    patch: int
    num_frames: int
    merge: int
    positions_a_side: int
    out_width: int
    kind: Literal["qwen3_5"] = "qwen3_5"
    prefixes: tuple[str, ...] = ("visual.",)

    def own_name(self, name: str) -> str:
        """See TowerPlan."""
        return _strip(name, "model.")

    def tensors(self) -> Mapping[str, Shape]:
        """See TowerPlan."""
        d, f, joined = self.width, self.inner, self.width * self.merge**2
        named: dict[str, Shape] = {
            "visual.patch_embed.proj.weight": (d, 3, self.num_frames, self.patch, self.patch),
            "visual.patch_embed.proj.bias": (d,),
            "visual.pos_embed.weight": (self.positions_a_side**2, d),
            "visual.merger.norm.weight": (d,),
            "visual.merger.norm.bias": (d,),
            **_with_bias(
                "visual.merger",
                {"linear_fc1": (joined, joined), "linear_fc2": (self.out_width, joined)},
            ),
        }
        linears = {
            "attn.qkv": (3 * d, d),
            "attn.proj": (d, d),
            "mlp.linear_fc1": (f, d),
            "mlp.linear_fc2": (d, f),
        }
        for layer in range(self.num_layers):
            prefix = f"visual.blocks.{layer}"
            named |= _with_bias(prefix, linears)
            for norm in ("norm1", "norm2"):
                named |= {f"{prefix}.{norm}.weight": (d,), f"{prefix}.{norm}.bias": (d,)}
        return named

    def encoder(self) -> EncoderPlan:
        """See TowerPlan."""
        names = LayerNames(
            ("norm1", "norm2"),
            queries="attn.qkv",
            keys="attn.qkv",
            values="attn.qkv",
            output="attn.proj",
            up="mlp.linear_fc1",
            down="mlp.linear_fc2",
        )
        head_dim = self.width // self.num_heads
        return EncoderPlan(
            "visual.blocks",
            names,
            num_layers=self.num_layers,
            width=self.width,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            eps=QWEN_EPS,
            norm="layer",
            num_turned_parts=1,
        )

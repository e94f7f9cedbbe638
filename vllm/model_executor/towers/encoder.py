"""The layers of a tower as data, so that one implementation runs all of them (torch-free).

    x += norm(output(attention(norm(x))))     rows of one picture all see each other
    x += norm(down(gelu(gate(norm x)) * up(norm x)))

Norms on the way out, gates, turns and norms of heads are there or not.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names of a layer's tensors behind its prefix.

    Attributes:
        norms: Before attention and before the MLP; of four also behind both.
        queries, keys, values: Matrices; three times one name: it holds all three, end to end.
        output, up, down: Matrices.
        gate: What the MLP's values are multiplied by; "": nothing, and up is activated.
        query_norm, key_norm: Of each head; "": none.
    """

    norms: tuple[str, ...]
    queries: str
    keys: str
    values: str
    output: str
    up: str
    down: str
    gate: str = ""
    query_norm: str = ""
    key_norm: str = ""


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """Layers that are alike.

    Attributes:
        prefix: Of a layer's tensors, with its number behind.
        names: Of its tensors.
        num_layers: How many there are.
        width: Of the stream.
        num_heads, num_kv_heads, head_dim: Of attention.
        scale: Of its scores.
        eps: Of all norms.
        norm: Of the stream: "layer" with biases, or "rms".
        norms_values: Whether the values of a head are normed, without weights.
        num_turned_parts: Equal parts of a head, in each of which the first half turns with the
            second; 0: heads are not turned.
    """

    prefix: str
    names: LayerNames
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    norm: Literal["layer", "rms"]
    norms_values: bool = False
    num_turned_parts: int = 0

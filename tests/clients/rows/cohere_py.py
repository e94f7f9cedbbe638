"""cohere: vectors in all of its types, and ranked documents."""

import cohere
from client import MODEL, URL, Row, run

client = cohere.ClientV2(api_key="none", base_url=URL)
TEXTS = ["The train to Bergen leaves at nine.", "A cat sleeps."]
TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"]


def embed(row: Row) -> None:
    told = client.embed(
        model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=TYPES
    ).embeddings
    floats = told.float_
    made = (floats, told.int8, told.uint8, told.binary, told.ubinary)
    assert [one and len(one) for one in made] == [len(TEXTS)] * 5, made
    assert len(told.base64 or ()) == len(TEXTS), told.base64
    for vector, signed, unsigned, bits in zip(
        floats, told.int8, told.uint8, told.ubinary, strict=True
    ):
        assert [step + 128 for step in signed] == unsigned, (signed, unsigned)
        # The rows' model may make vectors of zeros.
        assert max(map(abs, signed)) == (127 if any(vector) else 0), (signed, vector)
        assert len(bits) * 8 == len(vector), (bits, vector)
    row.shown = f"{len(floats[0])} dimensions, {len(TYPES)} types"


def rerank(row: Row) -> None:
    told = client.rerank(model=MODEL, query="Which train?", documents=TEXTS, top_n=2)
    scores = [result.relevance_score for result in told.results]
    assert scores == sorted(scores, reverse=True)
    assert {result.index for result in told.results} == {0, 1}
    row.shown = f"{scores[0]:.3f}"


run({"embed, all types": embed, "rerank": rerank}, "cohere")

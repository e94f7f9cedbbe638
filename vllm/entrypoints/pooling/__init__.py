"""Vectors and scores of texts, by the model that generates: embeddings, rerank, score, pooling.

body -> inputs (prompts, tokens) -> compute (the engine's rows) -> plan (pooling, dense, norm)
                                                                -> embeddings | ranking
"""

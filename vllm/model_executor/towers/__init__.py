"""Towers: what turns a picture's pixels into rows that stand in the place of embeddings."""

"""A model's steps on a GPU: kernels that read pages, decode steps as graphs, memory."""

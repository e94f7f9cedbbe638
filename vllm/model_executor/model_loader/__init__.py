"""Finding a checkpoint, naming its tensors and reading them into a model.

``resolve`` and ``weight_names`` are torch-free (the API process uses the first); ``loader`` is not,
so nothing is re-exported here.
"""

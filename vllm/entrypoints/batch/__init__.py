"""``vllm run-batch``: a file of requests in, a file of responses out."""

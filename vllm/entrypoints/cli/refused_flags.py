"""Flags of vLLM's ``serve`` that this server knows and does not support yet."""

from vllm.utils.argparse_utils import RefusedFlag


def _value(
    *names: str, harmless: tuple[str, ...] = (), advice: str = "leave it out"
) -> RefusedFlag:
    return RefusedFlag(names, harmless, advice=advice)


def _switch(*names: str, advice: str = "leave it out") -> RefusedFlag:
    return RefusedFlag(names, is_switch=True, advice=advice)


REFUSED_SERVE_FLAGS = (
    # Prefix cache and KV cache.
    _value("--prefix-match-unit"),
    _value("--kv-offloading-size"),
    _value("--kv-offloading-backend", harmless=("native",)),
    _value("--kv-transfer-config"),
    _switch("--kv-cache-metrics"),
    _value("--kv-cache-metrics-sample"),
    _value("--cpu-offload-gb", harmless=("0",)),
    _value("--swap-space", harmless=("0",)),
    # Scheduling.
    _switch("--async-scheduling"),
    _value("--max-num-queued-tokens"),
    _value("--stream-interval", harmless=("1",)),
    _value("--long-prefill-token-threshold", harmless=("0",)),
    # Model and weights.
    _value("--quantization", "-q", harmless=("none",)),
    _switch("--trust-remote-code", advice="leave it out, no code of a model is ever run"),
    _value("--hf-overrides", harmless=("{}",), advice="edit the checkpoint's config.json"),
    _value("--override-generation-config", harmless=("{}",)),
    _value("--logprobs-mode", harmless=("raw_logprobs",)),
    _value("--compilation-config", "-cc"),
    _switch("--enable-lora"),
    _value("--lora-modules"),
    _switch("--enable-sleep-mode"),
    _switch("--skip-tokenizer-init"),
    _value("--device", harmless=("auto",)),
    # Parallelism.
    _value("--tensor-parallel-size", "-tp", harmless=("1",)),
    _value("--pipeline-parallel-size", "-pp", harmless=("1",)),
    _value("--data-parallel-size", "-dp", harmless=("1",)),
    _switch("--enable-expert-parallel", "-ep"),
    _value("--distributed-executor-backend", harmless=("uni",)),
    _value("--api-server-count", harmless=("1",)),
    # Chats.
    _value("--tool-parser-plugin", advice="name one of --tool-call-parser's formats"),
    _value("--reasoning-parser-plugin", advice="name one of --reasoning-parser's formats"),
    _value("--chat-template-content-format", harmless=("auto", "string")),
    _value("--structured-outputs-config"),
    # Server.
    _value("--config", advice="give the flags on the command line"),
    _value("--disable-access-log-for-endpoints"),
    _value("--otlp-traces-endpoint"),
    _value("--ssl-keyfile", advice="put a TLS proxy in front"),
    _value("--ssl-certfile", advice="put a TLS proxy in front"),
    _value("--ssl-ca-certs", advice="put a TLS proxy in front"),
    _value("--root-path", harmless=("",)),
    _value("--uds", advice="use --host and --port"),
    _value("--sse-keep-alive-interval", harmless=("0",)),
    _switch("--enable-per-request-metrics"),
)

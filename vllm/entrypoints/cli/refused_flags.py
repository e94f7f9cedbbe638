"""Flags of vLLM's ``serve`` that this server knows and does not support yet."""

from vllm.utils.argparse_utils import RefusedFlag


def _value(
    *names: str, harmless: tuple[str, ...] = (), advice: str = "leave it out"
) -> RefusedFlag:
    return RefusedFlag(names, harmless, advice=advice)


def _switch(*names: str, advice: str = "leave it out") -> RefusedFlag:
    return RefusedFlag(names, is_switch=True, advice=advice)


# Each node would serve all requests alone.
_OTHER_MACHINES = "other machines' cores take --data-parallel-backend ray"

REFUSED_SERVE_FLAGS = (
    # Prefix cache and KV cache.
    _value("--ec-transfer-config"),
    # Scheduling.
    _value("--scheduler-cls"),
    # Model and weights.
    _value("--logprobs-mode", harmless=("raw_logprobs",)),
    _value("--hf-config-path", advice="put config.json beside the weights"),
    _value("--rope-scaling", "--rope-theta", advice="use --hf-overrides"),
    _value("--tokenizer-revision", advice="use --tokenizer with a folder"),
    _value("--logits-processors", advice="no code of a user's is run"),
    _value("--pooler-config"),
    _value("--task", harmless=("auto", "generate")),
    _value("--runner", harmless=("auto", "generate")),
    _value("--convert", harmless=("auto", "none")),
    _switch("--disable-sliding-window"),
    _switch("--enable-prompt-embeds"),
    _switch("--enable-mm-embeds"),
    _switch("--enable-lora"),
    _value("--max-loras"),
    _value("--max-lora-rank"),
    _value("--lora-modules"),
    _switch("--enable-sleep-mode"),
    _switch("--skip-tokenizer-init"),
    _value("--device", harmless=("auto",)),
    # Parallelism.
    _value("--worker-cls", harmless=("auto",)),
    _value("--nnodes", "-n", harmless=("1",), advice=_OTHER_MACHINES),
    _value("--node-rank", "-r", harmless=("0",), advice=_OTHER_MACHINES),
    _value("--pipeline-parallel-size", "-pp", harmless=("1",)),
    _value("--data-parallel-rank", "-dpn", harmless=("0",), advice="give --data-parallel-size"),
    _switch("--data-parallel-hybrid-lb"),
    _switch("--data-parallel-external-lb"),
    _value("--decode-context-parallel-size", "-dcp", harmless=("1",)),
    _value("--prefill-context-parallel-size", "-pcp", harmless=("1",)),
    _switch("--headless"),
    # Chats.
    _value("--chat-template-content-format", harmless=("auto", "string")),
    _value("--structured-outputs-config"),
    # Server.
    _switch("--enable-scale-out"),
    _switch("--trust-request-chat-template", advice="use --chat-template"),
    _switch("--return-tokens-as-token-ids", advice="set the field in requests"),
    _value("--response-role", harmless=("assistant",)),
    _value("--tool-server"),
    _value("--middleware", advice="put a proxy in front"),
)

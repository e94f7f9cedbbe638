"""Flags of vLLM's ``serve`` that may be given here and change nothing: one warning each says so."""

from vllm.utils.argparse_utils import IgnoredFlag

_ONE_MACHINE = "the workers are on this machine and find each other"
_NO_COMPILER = "nothing is compiled, and answers do not depend on it"
_NO_GRAPHS = "no graphs are captured on a CPU, and answers do not depend on it"
_OWN_MEDIA = "pictures are read one way, and answers do not depend on it"
_NO_MOE_KERNELS = "experts are computed one way, and answers do not depend on it"
_OWN_CHUNKS = "the scheduler shares out a step's tokens its own way"
_LOG_ONLY = "it would only change what is logged"


def _value(why: str, *names: str) -> IgnoredFlag:
    return IgnoredFlag(names, why)


def _switch(why: str, *names: str) -> IgnoredFlag:
    return IgnoredFlag(names, why, is_switch=True)


IGNORED_SERVE_FLAGS = (
    # Prefix cache and KV cache.
    _value("hits end at every --block-size tokens already", "--prefix-match-unit"),
    _value("weights stay on the device", "--cpu-offload-gb"),
    _value("preempted requests are computed again, not swapped", "--swap-space"),
    _switch("the cache's layout is one for all layers", "--disable-hybrid-kv-cache-manager"),
    _switch("keys and values are stored in the model's type", "--calculate-kv-scales"),
    _switch("the cache decides how the window of a hit comes about", "--swa-bounded-replay"),
    _switch("prefill is computed one way", "--kv-sharing-fast-prefill"),
    # Scheduling.
    _value("every token is sent as it comes", "--stream-interval"),
    _value(_OWN_CHUNKS, "--long-prefill-token-threshold"),
    _value(_OWN_CHUNKS, "--max-long-partial-prefills"),
    _value(_OWN_CHUNKS, "--max-num-partial-prefills"),
    _switch(_OWN_MEDIA, "--disable-chunked-mm-input"),
    # Model and weights.
    _switch("no code of a model is ever run", "--trust-remote-code"),
    _value("no code of a model is ever run", "--code-revision"),
    _value("weights are mapped, and read as they are needed", "--safetensors-load-strategy"),
    _value("weights are read by one thread", "--max-parallel-loading-workers"),
    _value("weights are read the one way", "--model-loader-extra-config"),
    _switch(_LOG_ONLY, "--use-tqdm-on-load"),
    _value("the model's own implementation is the only one", "--model-impl"),
    _value("the token is read from HF_TOKEN", "--hf-token"),
    _value("the model says it", "--config-format"),
    _value("only the files that a model needs are fetched", "--ignore-patterns"),
    _switch("sums are exact either way", "--disable-cascade-attn"),
    # Devices, kernels and compilation.
    _value(_NO_COMPILER, "--compilation-config", "-cc"),
    _value(_NO_COMPILER, "--optimization-level", "-O"),
    _value(_NO_GRAPHS, "--cudagraph-capture-sizes"),
    _value(_NO_GRAPHS, "--max-cudagraph-capture-size"),
    _value(_NO_GRAPHS, "--cuda-graph-sizes"),
    _value("the platform has one", "--attention-backend"),
    _value("the platform has one", "--attention-config", "-ac"),
    _value(_NO_MOE_KERNELS, "--moe-backend"),
    _value(_NO_MOE_KERNELS, "--all2all-backend"),
    _value(_NO_MOE_KERNELS, "--kernel-config"),
    _switch(_NO_MOE_KERNELS, "--enable-eplb"),
    _value(_NO_MOE_KERNELS, "--eplb-config"),
    _value(_NO_MOE_KERNELS, "--expert-placement-strategy"),
    # Parallelism of one machine.
    _value("no code of a user's is run", "--worker-extension-cls"),
    _value(_ONE_MACHINE, "--master-addr"),
    _value(_ONE_MACHINE, "--master-port"),
    _value(
        "cores are started from here and join by themselves", "--data-parallel-rpc-port", "-dpp"
    ),
    _switch(_ONE_MACHINE, "--disable-custom-all-reduce"),
    _switch(_ONE_MACHINE, "--enable-dbo"),
    _switch(_ONE_MACHINE, "--ray-workers-use-nsight"),
    # Media.
    _value(_OWN_MEDIA, "--mm-processor-cache-type"),
    _value(_OWN_MEDIA, "--mm-encoder-tp-mode"),
    _switch(_OWN_MEDIA, "--skip-mm-profiling"),
    _switch(_OWN_MEDIA, "--interleave-mm-strings"),
    # Logs and measurements.
    _switch(_LOG_ONLY, "--enable-log-outputs"),
    _switch(_LOG_ONLY, "--enable-log-deltas"),
    _switch(_LOG_ONLY, "--log-error-stack"),
    _switch(_LOG_ONLY, "--disable-log-requests"),
    _switch(_LOG_ONLY, "--enable-logging-iteration-details"),
    _switch("drafts and experts are measured already, or never", "--enable-mfu-metrics"),
    _switch("what is measured does not change answers", "--enable-layerwise-nvtx-tracing"),
    _value("a span has one level of detail", "--collect-detailed-traces"),
    # Server.
    _switch("/docs and /openapi.json are always there", "--enable-offline-docs"),
    _switch("the load is always counted (GET /load)", "--enable-server-load-tracking"),
    _switch("nothing is collected in the background", "--disable-frontend-multiprocessing"),
    _value("the web server bounds headers itself", "--h11-max-incomplete-event-size"),
    _value("the web server bounds headers itself", "--h11-max-header-count"),
    _value("chats are rendered in the event loop's thread", "--renderer-num-workers"),
)

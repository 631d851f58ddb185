"""Tables of the flags of vLLM, SGLang and llama.cpp, by how piecework treats them.

Names and meanings: `vllm serve --help` (vllm/engine/arg_utils.py, vllm/config/ and
vllm/entrypoints/openai/cli_args.py), SGLang's docs/advanced_features/server_arguments.md,
llama.cpp's tools/server/README.md.
"""

from __future__ import annotations

from collections.abc import Mapping

_PRIORITY = "requests run by `priority`, highest first, then by arrival"

# Settings with only one possible value here: the accepted values, and the reason.
ONE_VALUE: Mapping[tuple[str, ...], tuple[tuple[str, ...], str]] = {
    ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp"): (
        ("1",),
        "pipeline parallelism is not supported; --tp-size splits a model over devices",
    ),
    ("--tokenizer-mode",): (("auto",), "there is only one tokenizer mode"),
    ("--config-format",): (("auto", "hf"), "config.json is the only format"),
    ("--schedule-policy", "--scheduling-policy"): (
        ("fcfs",),
        _PRIORITY,
    ),
    ("--stream-interval",): (("1",), "each step's tokens are sent at once"),
    ("--api-server-count", "-asc", "--tokenizer-worker-num"): (
        ("1",),
        "one process answers HTTP; --dp-size N runs N engines behind it",
    ),
    ("--response-role",): (("assistant",), "answers are the assistant's"),
    ("--logprobs-mode",): (
        ("raw_logprobs",),
        "log-probabilities are those of the model, before sampling parameters",
    ),
    ("--radix-eviction-policy",): (("lru",), "the least recently used pages are evicted first"),
    ("--moe-runner-backend",): (("auto",), "expert kernels are chosen for the machine"),
    ("--moe-a2a-backend",): (
        ("none",),
        "--ep-size splits experts, with collectives chosen for the machine",
    ),
    ("--reasoning-budget",): (("-1",), "a request sets its thinking budget"),
    ("-rea", "--reasoning"): (
        ("auto",),
        "a request turns reasoning off by chat_template_kwargs or reasoning_effort",
    ),
    ("--speculative-eagle-topk",): (("1",), "drafts are chains, not trees"),
    ("--disaggregation-mode",): (
        ("null",),
        "one engine computes prompts and answers; servers with the same --kv-disk FOLDER find each "
        "other's prompts",
    ),
}

# Flags that ask for what piecework always does.
NOTHING_TO_DO = (
    "--async-scheduling",
    "--cache-prompt",
    "--disable-log-requests",
    "--disable-uvicorn-access-log",
    "--enable-auto-tool-choice",
    "--enable-cache-report",
    "--enable-chunked-prefill",
    "--enable-metrics",
    "--enable-mixed-chunk",
    "--enable-offline-docs",
    "--enable-priority-scheduling",
    "--enable-prompt-tokens-details",
    "--enable-reasoning",
    "--enable-request-id-headers",
    "--enable-tokenizer-info-endpoint",
    "--escape",
    "--jinja",
    "--metrics",
    "--no-agent",
    "-no-ag",
    "--no-context-shift",
    "--no-enable-log-requests",
    "--no-enforce-eager",
    "--no-trust-remote-code",
    "--prefill-assistant",
    "--sleep-on-idle",
    "--ui",
    "--webui",
    "-cb",
    "--cont-batching",
    "-e",
    "-kvu",
    "--kv-unified",
)

_LOADING = "weights are mapped from disk, and copied only if a device or a packed format needs it"
_WAITING = (
    "waiting is tuned for the machine; --num-threads and --cpu-bind place the compute threads"
)
_STEP = "--chunked-prefill-size limits a step"
_KEPT = "prefixes and states stay in the KV cache until their memory is needed"
_METHODS = "--cors-origins allows all methods and headers"
_LOG_LINES = "--log-format sets the format of log lines"
_KERNELS = "kernels are chosen for the machine"
_FIGURES = "the metrics, buckets and labels of /metrics are fixed"
_TOKENIZE = "the web process tokenises each text when it arrives"
_FITS = "--mem-fraction-static or --max-total-tokens sets the size of the KV cache"
_SLOTS = "there are no slots; all requests share prefixes"

# Harmless flags without a value that are ignored, with the reason.
SWITCHES_WITHOUT_EFFECT: Mapping[tuple[str, ...], str] = {
    ("--mlock", "--mmap", "--no-mmap", "-dio", "--direct-io", "-ndio", "--no-direct-io"): _LOADING,
    ("--repack", "-nr", "--no-repack", "--no-host", "--use-tqdm-on-load"): _LOADING,
    ("--no-use-tqdm-on-load", "--check-tensors"): _LOADING,
    ("-v", "--verbose", "--log-verbose"): "--log-level debug logs more",
    ("--log-disable",): "--log-level error logs the least",
    ("--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps"): _LOG_LINES,
    ("--no-warmup", "--skip-server-warmup"): "--startup sets what is done before the "
    "server is ready",
    ("--no-kv-unified", "-no-kvu", "--swa-full", "--disable-hybrid-swa-memory"): _KEPT,
    ("--disable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager"): _KEPT,
    ("--cache-idle-slots", "--no-cache-idle-slots"): _KEPT,
    ("-kvo", "--kv-offload", "--op-offload", "--no-op-offload"): "all layers run on --device",
    ("--perf", "--no-perf", "--show-time-cost"): "/metrics and the start summary have times",
    ("-bs", "--backend-sampling", "--disable-cascade-attn", "--no-disable-cascade-attn"): _KERNELS,
    ("--disable-flashinfer-autotune", "--enable-p2p-check", "--disable-cuda-graph-padding"): (
        _KERNELS
    ),
    ("--enable-flashinfer-allreduce-fusion", "--enable-aiter-allreduce-fusion"): _KERNELS,
    ("--disable-custom-all-reduce",): "collectives are chosen for the machine",
    ("--flashinfer-mla-disable-ragged", "--disable-shared-experts-fusion"): _KERNELS,
    ("--disable-chunked-prefix-cache", "--enable-fused-qk-norm-rope"): _KERNELS,
    ("--enable-tokenizer-batch-encode", "--disable-tokenizer-batch-decode"): _TOKENIZE,
    ("--enable-dynamic-batch-tokenizer", "--disable-outlines-disk-cache"): _TOKENIZE,
    ("--use-v2-block-manager", "--multi-step-stream-outputs", "--disable-async-output-proc"): _STEP,
    ("--abort-on-priority-when-disabled", "--prefill-round-robin-balance"): _PRIORITY,
    ("--scheduler-reserve-full-isl", "--no-scheduler-reserve-full-isl"): _STEP,
    ("--enable-cudagraph-gc", "--enable-profile-cuda-graph"): _KERNELS,
    ("--cors-credentials", "--no-cors-credentials", "--allow-credentials"): _METHODS,
    ("--slots", "--no-slots"): _SLOTS,
    ("--enable-multimodal",): "a model that takes images reads them without a flag",
    ("--mmproj-auto",): "a vision tower beside the model is found without a flag",
    ("--mmproj-offload", "--no-mmproj-offload"): "the vision tower runs on --device",
    ("--disable-frontend-multiprocessing", "--enable-server-load-tracking"): "one process answers "
    "HTTP, and /metrics shows its load",
    ("--enable-mfu-metrics", "--enable-metrics-for-all-schedulers"): _FIGURES,
    ("--collect-tokens-histogram", "--enable-request-time-stats-logging"): _FIGURES,
    ("--enable-logging-iteration-details", "--kv-cache-metrics", "--cudagraph-metrics"): _FIGURES,
    ("--kv-sharing-fast-prefill", "--no-kv-sharing-fast-prefill"): _KERNELS,
    ("--enable-trace",): "--otlp-traces-endpoint turns traces on",
    ("--log-error-stack", "--no-log-error-stack"): "--log-level debug logs stack traces",
    ("--models-autoload", "--no-models-autoload"): "a model loads at its first request, or at the "
    "start with `preload` in the file of --config",
    ("--incremental-streaming-output",): "each chunk of a stream has only new text",
}

# Harmless flags with one value that are ignored, with the reason.
VALUES_WITHOUT_EFFECT: Mapping[tuple[str, ...], str] = {
    ("-ngl", "--gpu-layers", "--n-gpu-layers"): "all layers run on --device",
    ("-tb", "--threads-batch"): "--num-threads also sets the threads of prompts",
    ("-b", "--batch-size", "-ub", "--ubatch-size"): _STEP,
    ("--prefill-max-requests", "--max-num-partial-prefills", "--max-long-partial-prefills"): _STEP,
    ("--long-prefill-token-threshold", "--schedule-conservativeness"): _STEP,
    ("--num-continuous-decode-steps", "--num-scheduler-steps"): "a step computes one token per "
    "request",
    ("-lm", "--load-mode", "--max-parallel-loading-workers"): _LOADING,
    ("--numa",): "--cpu-bind auto gives each rank a NUMA node",
    ("--prio", "--prio-batch", "--poll", "--poll-batch", "--threads-http"): _WAITING,
    ("-dt", "--defrag-thold", "-cram", "--cache-ram", "--cache-reuse"): _KEPT,
    ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "-cms", "--checkpoint-min-step"): _KEPT,
    ("--swa-full-tokens-ratio", "--prefix-caching-hash-algo"): _KEPT,
    ("--mamba-full-memory-ratio", "--max-mamba-cache-size", "--mamba-scheduler-strategy"): _KEPT,
    ("--mamba-track-interval", "--mamba-block-size", "--mamba-cache-mode"): _KEPT,
    ("--mamba-ssm-dtype", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype"): "recurrent states "
    "are always float32",
    ("-fitt", "--fit-target", "-fitc", "--fit-ctx"): _FITS,
    ("--cors-methods", "--cors-headers", "--allowed-methods", "--allowed-headers"): _METHODS,
    ("-lv", "--verbosity", "--log-verbosity"): "--log-level sets how much is logged",
    ("-to", "--timeout"): "a request runs as long as its client waits",
    ("-sps", "--slot-prompt-similarity"): _SLOTS,
    ("--tags", "--weight-version", "--fingerprint-mode", "--fingerprint-value"): "answers contain "
    "only the model's name",
    ("--soft-watchdog-timeout", "--gc-warning-threshold-secs"): "--watchdog-timeout sets how long "
    "an engine may miss heartbeats",
    ("--decode-log-interval",): "--log-stats-interval SECONDS sets how often throughput is logged",
    ("--chat-template-content-format",): "the content format is detected from the chat template",
    ("--sampling-backend", "--mm-attention-backend", "--fp8-gemm-backend"): _KERNELS,
    ("--fp4-gemm-backend", "--prefill-attention-backend", "--decode-attention-backend"): _KERNELS,
    ("--mamba-backend", "--linear-attn-backend", "--gdn-prefill-backend"): _KERNELS,
    ("--triton-attention-num-kv-splits", "--triton-attention-reduce-in-fp32"): _KERNELS,
    (
        "--load-balance-method",
    ): "a request goes to the replica with its prefix, or to the least loaded",
    ("--tokenizer-metrics-custom-labels-header",): _FIGURES,
    ("--dynamic-batch-tokenizer-batch-size", "--dynamic-batch-tokenizer-batch-timeout"): _TOKENIZE,
    ("--priority-scheduling-preemption-threshold", "--preemption-mode"): _PRIORITY,
    ("--scheduler-recv-interval", "--num-reserved-decode-tokens", "--num-lookahead-slots"): _STEP,
    ("--hybrid-kvcache-ratio", "--load-watch-interval"): _KEPT,
    ("--triton-attention-split-tile-size", "--flashinfer-mxfp4-moe-precision"): _KERNELS,
    ("--safetensors-load-strategy", "--pt-load-map-location"): _LOADING,
    ("--show-hidden-metrics-for-version", "--kv-cache-metrics-sample"): _FIGURES,
    ("--warmups",): "--startup sets what is done before the server is ready",
    ("--h11-max-incomplete-event-size", "--h11-max-header-count"): "--max-header-bytes limits the "
    "headers of a request",
    ("--max-log-len", "--collect-detailed-traces"): "logs and traces contain no content of "
    "requests",
}

# Harmless flags with several values that are ignored, with the reason.
LISTS_WITHOUT_EFFECT: Mapping[tuple[str, ...], str] = {
    ("--bucket-time-to-first-token", "--bucket-inter-token-latency"): _FIGURES,
    ("--bucket-e2e-request-latency", "--prompt-tokens-buckets"): _FIGURES,
    ("--generation-tokens-buckets", "--tokenizer-metrics-allowed-custom-labels"): _FIGURES,
    ("--uvicorn-access-log-exclude-prefixes", "--disable-access-log-for-endpoints"): "only "
    "--log-level debug logs HTTP requests",
}

# Ignored flags with the optional value on, off or auto.
CHOICES_WITHOUT_EFFECT: Mapping[tuple[str, ...], str] = {
    ("-fa", "--flash-attn"): "--attention-backend sets the attention kernel",
    ("-fit", "--fit"): _FITS,
    ("--log-colors",): _LOG_LINES,
}

_TOOLS = "--tool-call-parser sets the format of calls; nothing else needs a flag"
_LORA = (
    "adapters (LoRA) are set by --lora-modules, --max-loras, --max-lora-rank and --max-cpu-loras"
)
_SPECULATION = (
    "a proposal is accepted if it is the token that would have been sampled; "
    "--speculative-algorithm, --speculative-draft-model-path, --speculative-num-steps and "
    "--speculative-num-draft-tokens set the rest"
)
_POOLING = "modules.json and the architecture decide how states become vectors or scores"
_SIZES = "--cuda-graph-bs and --piecewise-cuda-graph-tokens set the captured sizes"
_FOLDER_SAYS = "change the model's config.json instead"
_REQUEST = "set it in the request; --sampling-defaults FOLDER takes defaults from a " + (
    "generation_config.json"
)
_IN_REQUEST = "set it in the request"
_IMAGES = (
    "--limit-mm-per-prompt, --allow-remote-media, --allowed-local-media-path, --max-image-pixels "
    "set which images requests may have; audio and video in prompts are not supported"
)
_PREFIX = "the server answers at the root; let the reverse proxy strip the prefix"
_COLLECTIVES = "collectives are chosen for the machine; --tp-size and --ep-size split a model"
_HOST_MEMORY = "nothing is swapped to host memory; a preempted request is computed again"
_PULL = "download the file (piecework pull) and give its path with --model-path"
_TEMPLATE = "--chat-template FILE sets it"
_ONE_ENGINE = (
    "one engine computes prompts and answers; --dp-size runs several engines, and servers with the "
    "same --kv-disk FOLDER find each other's prompts"
)
_LOWER_TIERS = "--kv-host-memory SIZE and --kv-disk FOLDER:SIZE keep what the KV cache evicts"
_AS_IT_IS = "a model is read as it is; prepare its folder first and give it with --model-path"
_SEVERAL = "give --model-path NAME=PATH more than once to serve several models"
_TRACES = "--log-requests logs one line per request, without content"

# Patterns of flags that are refused, with advice.
REFUSED: Mapping[str, str] = {
    "--gpu-memory-utilization": "it is a share of all memory, weights included; use "
    "--mem-fraction-static F, the share of the memory left after loading the weights that the KV "
    "cache takes",
    "--kv-cache-memory-bytes|--num-gpu-blocks-override": "--max-total-tokens N sets the size of "
    "the KV cache, in tokens",
    "--max-prefill-tokens": "--chunked-prefill-size N limits the new tokens of a step",
    "--no-enable-chunked-prefill|--enable-dynamic-chunking|--(enable-)?prefill-delayer.*": "long "
    "prompts are always computed in chunks of --chunked-prefill-size tokens",
    "-nocb|--no-cont-batching": "requests always share steps; --max-running-requests 1 computes "
    "one at a time",
    "--(no-)?kv-offloading-.*|--(enable-)?hierarchical-.*|--hicache-.*|--enable-lmcache": (
        _LOWER_TIERS
    ),
    "--enable-(memory-saver|weights-cpu-backup)": "--enable-sleep-mode lets an engine give its "
    "memory back",
    "--swap-space|--cpu-offload-.*|-nkvo|--no-kv-offload|--offload-.*": _HOST_MEMORY,
    "--compilation-config|-cc(\\..*)?|-O.*|--optimization-level|--performance-mode|"
    "--enable-torch-compile.*|--torch-compile-.*|--torchao-config": "--piecewise-cuda-graph "
    "compiles; see `pieces and graphs` in --help",
    "--cuda-?graph-(capture-)?sizes|--max-cudagraph-capture-size|--max-seq-len-to-capture|"
    "--max-context-len-to-capture|--piecewise-cuda-graph-tokens-.*": _SIZES,
    "--tool-parser-plugin|--tool-server|--tools|-ag|--agent|--reasoning-parser-plugin|"
    "--exclude-tools-when-tool-choice-none": _TOOLS,
    "--(enable-)?lora(-.*)?|--max-loras.*|--max-lora-.*|--max-cpu-loras|--max-loaded-loras|"
    "--fully-sharded-loras|--long-lora-.*|--qlora-.*|--enable-prompt-adapter|"
    "--max-prompt-adapter.*|--default-mm-loras|--specialize-active-lora": _LORA,
    "--control-vector(-.*)?": "control vectors are not supported",
    "--speculative-.*|--spec-.*|--draft.*|"
    "-(t|tb|C|Cr|Cb|ctk|ctv|hf|hfr|ot|cmoe|ncmoe|dev|ngl)d|--.*-draft(-.*)?|"
    "--enable-multi-layer-eagle|-lcs|-lcd|--lookup-cache-.*|"
    "--ngram-.*|--typical-acceptance-.*|--disable-logprobs-during-spec-decoding": (_SPECULATION),
    "--guided-decoding-.*|--structured-outputs-.*|--grammar-backend|--constrained-json-.*": (
        "llguidance does structured output, without a flag"
    ),
    "--convert|--pooler-config|--override-pooler-config|--pooling|--embd-normalize": _POOLING,
    "--mm-.*|--(no-)?.*-mm-.*|"
    "--mmproj-url|-mmu|--image-.*|--mtmd-.*|--media-.*|--video-.*|"
    "--enable-multimodal-.*|--disable-fast-image-processor|--enable-precise-embedding-interpolation|"
    "--disable-chunked-mm-input|--(no-)?interleave-mm-strings|"
    "--(no-)?skip-mm-profiling": _IMAGES,
    "-mv|--model-vocoder|-hfv|-hfrv|--hf-repo-v|-hffv|--hf-file-v|--tts-.*": "speech is not "
    "supported",
    "--hf-overrides|--hf-config-path|--json-model-override-args|--rope-.*|--yarn-.*|"
    "--override-kv|--model-config-.*|--(no-)?disable-sliding-window|--override-attention-dtype": (
        _FOLDER_SAYS
    ),
    "--revision|--code-revision|--tokenizer-revision": "download that revision "
    "(piecework pull MODEL --revision NAME) and serve the folder that it prints",
    "--download-dir": "set the variable HF_HUB_CACHE to the folder for models of the hub",
    "--offline": "set the variable HF_HUB_OFFLINE=1",
    "-hft|--hf-token": "set the variable HF_TOKEN",
    "--uvicorn-log-level|--log-level-http": "--log-level sets the level of all processes; debug "
    "logs every HTTP request",
    "--log-config-file|--log-file|--log-prompts-dir|--crash-dump-folder|--log-outputs": "logs go "
    "to standard error, so redirect that; --log-format json writes objects",
    "--enable-log-requests|--log-requests-.*|--enable-log-(outputs|deltas)|--export-metrics-.*": (
        _TRACES
    ),
    "--max-logprobs": "the limit is 100 log-probabilities per token",
    "--(enable-)?ssl-.*": "TLS is not supported; put a reverse proxy in front",
    "--root-path|--fastapi-root-path|--api-prefix": _PREFIX,
    "--uds|--reuse-port|--grpc-mode|--smg-.*": "the server listens for HTTP on --host and --port",
    "--path|--(ui|webui)-config(-file)?|--(no-)?(ui|webui)-mcp-proxy": "the page at / has no "
    "settings; --no-page removes it",
    "--disable-fastapi-docs": "/docs cannot be removed; --no-page removes the page at /",
    "--middleware": "put a reverse proxy in front that changes requests and answers",
    "--base-gpu-id|--gpu-id-step|-dev": "--device sets the kind of device; set the variable "
    "CUDA_VISIBLE_DEVICES to choose GPUs",
    "--list-devices": "`piecework explain` shows what runs where",
    "-cl|--cache-list": "`piecework models` lists downloaded models",
    "--completion-bash": "`piecework completion bash` prints it",
    "--version": "`piecework --version` prints it",
    "--usage": "--help prints it",
    "-C|-Cr|-Cb|-Crb|--cpu-mask(-batch)?|--cpu-range(-batch)?|"
    "--cpu-strict(-batch)?|--numa-(bind|node).*": ("--cpu-bind sets the cores of each rank"),
    "-ot|--override-tensor|-cmoe|--cpu-moe|-ncmoe|--n-cpu-moe|--rpc|--kt-.*": "all layers run on "
    "--device; a model cannot be split between a CPU and a GPU",
    "-sm|--split-mode|-ts|--tensor-split|-mg|--main-gpu": "--tp-size splits a model over devices",
    "--master-addr|--master-port|--nccl-port|--nccl-init-addr|--data-parallel-.*|-dp[a-z]|"
    "--nnodes-.*|--node-rank-.*": "--dist-init-addr HOST:PORT sets the address of node 0",
    "--nccl-.*|--distributed-.*|--enable-.*expert.*|--(enable-)?eplb.*|--ep-.*|--expert-.*|"
    "--(enable-)?dbo.*|--all2all-.*|--.*-deepep.*|--deepep-.*|--enable-dp-.*|--moe-.*|--elastic-.*|"
    "--init-expert-location|--mooncake-.*|--(decode|prefill)-context-parallel-.*|-dcp|-pcp|"
    "--enable-nccl-.*|--attn-cp-.*|--attention-context-.*|--cp-.*|--dcp-.*|--pp-.*|"
    "--enable-(elastic-ep|quant-communications|symm-mem|torch-symm-mem|mscclpp|attn-tp-.*)|"
    "--ray-.*|--enable-(two|single)-batch-overlap|--tbo-.*|--num-redundant-experts|"
    "--disable-nccl-.*|--headless": _COLLECTIVES,
    "--(enable-)?(dsa|nsa)-.*|--enable-.*-moe|--enable-fused-grouped-.*|"
    "--disable-flashinfer-cutlass-.*": _KERNELS,
    "--enable-layerwise-nvtx-.*": "POST /start_profile profiles steps with torch.profiler",
    "--enable-fp32-lm-head": "--dtype float32 computes everything in 32 bits",
    "--calculate-kv-scales": "--kv-cache-dtype fp8_e4m3 uses the checkpoint's scales",
    "--dllm-.*": "diffusion language models are not supported",
    "--multi-item-scoring-delimiter": "POST /v1/score takes several texts",
    "--enable-nan-detection|--crash-on-nan": "there is no check for NaN",
    "--schedule-low-priority-values-first": _PRIORITY,
    "--enable-custom-logit-processor|--logits-processor.*|--io-processor-plugin|--scheduler-cls|"
    "--worker-.*|--forward-hooks|--msprobe-.*|--debug-tensor-.*|--custom-sigquit-handler|"
    "--additional-config": "the server does not run foreign code",
    "--enable-return-(hidden-states|routed-experts)|--enable-prompt-embeds": "prompts are text or "
    "token ids; answers are text and log-probabilities",
    "--skip-tokenizer-init": "the tokenizer is always loaded; prompts of token ids do not use it",
    "--temp|--temperature|--top-k|--top-p|--min-p|--repeat-.*|--presence-penalty|"
    "--frequency-penalty|--top-?n-?sigma|--xtc-.*|--typical(-p)?|--dry-.*|--dynatemp-.*|"
    "--mirostat.*|--adaptive-.*|--samplers|--sampl(er|ing)-seq|--preferred-sampling-params|"
    "--override-generation-config": _REQUEST,
    "--ignore-eos|-l|--logit-bias|--grammar(-file)?|-j|--json-schema|-jf|--json-schema-file|"
    "-sp|--special|-r|--reverse-prompt|--keep|--return-tokens-as-token-ids|"
    "--enable-force-include-usage|--(default-)?chat-template-kwargs|--allow-auto-truncate|"
    "--reasoning-budget-message|--(no-)?reasoning-preserve|--no-prefill-assistant|"
    "--enable-per-request-metrics": _IN_REQUEST,
    "--no-escape": "escapes in prompts are never processed",
    "--props": "settings cannot change while the server runs",
    "--context-shift": "an answer ends at the context length",
    "--no-jinja": "Jinja always renders chat templates",
    "--chat-template-file|--hf-chat-template-name|--completion-template|"
    "--trust-request-chat-template": _TEMPLATE,
    "--(no-)?skip-chat-parsing": "--reasoning-parser none leaves reasoning in the text",
    "--spm-infill": "the tokenizer's markers set the order of prefix and suffix",
    "-hff|--hf-file|-mu|--model-url|-dr|--docker-repo|--.*-(default|spec)": _PULL,
    "-n|--predict|--n-predict": "--default-max-tokens limits answers whose requests set no limit",
    "-ctk|--cache-type-k|-ctv|--cache-type-v": "--kv-cache-dtype sets the format of the KV cache",
    "--slot-save-path": "--kv-disk FOLDER keeps prefixes of all requests on disk",
    "--slot-.*": _SLOTS,
    "--models-(dir|preset|max)": _SEVERAL,
    "--sleep-idle-seconds": "with several models, --idle-unload SECONDS unloads idle ones",
    "--kv-transfer-config|--ec-transfer-config|--disaggregation-.*|--encoder-.*|"
    "--(enable-)?pdmux.*|--sm-group-num|--tokens-only|--role": (_ONE_ENGINE),
    "--admin-api-key": "--api-keys FILE sets what each key may do",
    "--file-storage-path": "--batch-dir FOLDER sets the folder of files and batches",
    "--model-loader-extra-config|--ignore-patterns|--model-checksum|--checkpoint-.*|"
    "--custom-weight-loader|--weight-loader-.*|--delete-ckpt-after-loading|--remote-instance-.*|"
    "--rl-.*|--modelopt-.*|--quantize-and-serve|--quantization-param-path|"
    "--decrypted-.*|--override-neuron-config|--weight-transfer-.*": (_AS_IT_IS),
}

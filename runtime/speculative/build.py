"""Makes the speculation of an engine."""

from __future__ import annotations

from dataclasses import replace

from ..cache.kinds import make_cache
from ..cache.kv_cache import KVCache
from ..config.engine import EngineConfig
from ..executor.model_runner import ModelRunner
from ..files.resolve import resolve_model_path
from ..loader.check import check_engine
from ..tokenizer.tokenizer import Tokenizer, load_tokenizer
from .draft_model import DraftModel
from .head import HeadDrafter
from .method import Drafter, Method
from .ngram import Ngram
from .prediction import Prediction
from .speculation import Speculation


def make_speculation(
    config: EngineConfig, runner: ModelRunner, cache: KVCache, *, progress: bool
) -> Speculation | None:
    """Return the speculation of an engine, or None without one.

    `cache` is that of the model.
    Raise `ValueError` for a draft model that does not suit the model or does not fit.
    """
    algorithm, path = config.speculative_algorithm, config.speculative_draft_model_path
    if config.plug_ins:
        return None  # They do not know tokens that are not verified yet.
    if algorithm == "none":
        return None
    is_cpu = runner.platform.device_type == "cpu"
    is_auto = algorithm == "auto" or runner.head is not None
    methods: list[Method] = [Prediction()] if is_auto or algorithm == "prediction" else []
    if algorithm == "ngram" or (is_auto and is_cpu):
        methods.append(Ngram())
    drafter: Drafter | None = None
    if runner.head is not None:
        drafter = runner.listener = HeadDrafter(
            runner.head,
            runner.attention,
            device=runner.device,
            slot_dtype=runner.platform.slot_dtype,
            steps=config.speculative_num_steps,
            reserve=cache.reserve,
        )
    elif path is not None:
        drafter = _draft_model(config, path, runner, progress=progress)
    return Speculation(
        methods,
        most=config.speculative_num_draft_tokens,
        max_rows=runner.graphs.most_rows,
        drafter=drafter,
    )


def _draft_model(
    config: EngineConfig, path: str, target: ModelRunner, *, progress: bool
) -> DraftModel:
    """Load the draft model, with a KV cache of as many tokens as the model's own."""
    flag = "--speculative-draft-model-path"
    resolved = target.config
    draft_config = replace(
        config,
        model_path=path,
        tokenizer_path=None,
        gguf_pre_tokenizer=None,
        quantization="auto",
        tp_size=1,
        ep_size=1,
        nnodes=1,
        context_length=None,
        max_total_tokens=resolved.max_total_tokens,
        page_size=resolved.page_size,
        max_running_requests=resolved.max_running_requests,
        batch_invariant=False,
        kv_events_config=None,
        enable_lora=False,
        lora_modules="",
    )
    try:
        folder = resolve_model_path(path)
        check_engine(folder, draft_config)
        _check_vocabulary(
            load_tokenizer(
                target.model_path,
                config.tokenizer_path,
                gguf_pre_tokenizer=config.gguf_pre_tokenizer,
            ),
            load_tokenizer(folder),
        )
        free = target.platform.memory().free
        runner = ModelRunner(draft_config, progress=progress)
    except ValueError as error:
        raise ValueError(f"{flag} {path}: {error}") from None
    if runner.states is not None or runner.pool.window is not None:
        raise ValueError(
            f"{flag} {path}: the model has recurrent states or sliding windows, which cannot go "
            "back after a rejected token: choose a draft model with full attention"
        )
    needed = runner.info().weight_bytes + runner.pool.num_bytes
    if needed > free:
        raise ValueError(
            f"{flag} {path}: the draft model needs {needed / 2**30:.1f} GiB with its KV cache, and "
            f"{free / 2**30:.1f} GiB are free: lower --max-total-tokens or --mem-fraction-static"
        )
    cache = make_cache(
        runner.pool.num_pages,
        runner.pool.page_size,
        share_prefixes=not config.disable_radix_cache,
    )
    return DraftModel(
        runner, cache, steps=config.speculative_num_steps, vocab_size=target.vocab_size
    )


def _check_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise `ValueError` unless the same ids are the same tokens."""
    own, other = (each.backend.get_vocab(with_added_tokens=True) for each in (target, draft))
    differing = [token for token, number in own.items() if other.get(token) != number]
    if differing:
        raise ValueError(
            f"its vocabulary differs from the model's in {len(differing)} tokens, such as "
            f"{differing[0]!r}: choose a draft model with the same tokenizer"
        )

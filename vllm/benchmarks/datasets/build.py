"""From flags to prompts."""

import argparse

from vllm.benchmarks.datasets.corpora import (
    burstgpt_prompts,
    hub_prompts,
    sonnet_prompts,
    spec_bench_prompts,
)
from vllm.benchmarks.datasets.files import custom_prompts, sharegpt_prompts
from vllm.benchmarks.datasets.lines import BadLines
from vllm.benchmarks.datasets.pictures import (
    PictureShape,
    read_buckets,
    read_limit,
    with_pictures,
)
from vllm.benchmarks.datasets.prompt import BenchRequest
from vllm.benchmarks.datasets.synthetic import (
    Reading,
    RepeatShape,
    prefix_repetition,
    random_prompts,
    repeat_prompts,
)
from vllm.benchmarks.datasets.timed_trace import read_timed_trace, trace_prompts
from vllm.benchmarks.datasets.words import Words
from vllm.exceptions import ConfigError

FILE_DATASETS = (
    *("sharegpt", "custom", "timed_trace"),
    *("sonnet", "burstgpt", "spec_bench", "hf"),
)


def make_prompts(args: argparse.Namespace, words: Words) -> list[BenchRequest]:
    """Return what a command line asks to send.

    Raises:
        ConfigError: A value or a file is wrong.
    """
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts {args.num_prompts} must be at least 1.")
    if args.dataset_name in FILE_DATASETS:
        return _from_file(args, words)
    if args.dataset_name == "prefix_repetition":
        return prefix_repetition(
            words,
            args.num_prompts,
            args.seed,
            num_prefixes=args.prefix_repetition_num_prefixes,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            output_len=args.output_len or args.prefix_repetition_output_len,
        )
    if args.dataset_name == "repeat":
        return repeat_prompts(words, repeat_shape(args), args.num_prompts, args.seed)
    made = random_prompts(
        words,
        args.num_prompts,
        args.seed,
        input_len=args.input_len or args.random_input_len,
        output_len=args.output_len or args.random_output_len,
        prefix_len=args.random_prefix_len,
        range_ratio=args.random_range_ratio,
    )
    if args.dataset_name != "random-mm":
        return made
    backend = getattr(args, "backend", "none")
    if backend != "openai-chat":
        raise ConfigError(
            f"--dataset-name random-mm with --backend {backend}: pictures go into chats, so "
            "give --backend openai-chat."
        )
    shape = PictureShape(
        args.random_mm_base_items_per_request,
        args.random_mm_num_mm_items_range_ratio,
        read_limit(args.random_mm_limit_mm_per_prompt),
        read_buckets(args.random_mm_bucket_config),
        args.random_mm_repeat_rate,
    )
    return with_pictures(made, shape, args.seed)


def repeat_shape(args: argparse.Namespace) -> RepeatShape:
    """Return the shape that the ``--repeat-`` flags say."""
    return RepeatShape(
        Reading(args.repeat_reading),
        input_len=args.input_len or args.repeat_input_len,
        output_len=args.output_len or args.repeat_output_len,
        share=args.repeat_share,
        rate=args.repeat_rate,
        pool=args.repeat_pool,
    )


def _from_file(args: argparse.Namespace, words: Words) -> list[BenchRequest]:
    path = args.dataset_path
    if path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE.")
    if args.dataset_name == "sharegpt":
        output_len = args.output_len or args.sharegpt_output_len
        return sharegpt_prompts(words, path, args.num_prompts, args.seed, output_len)
    bad = BadLines(path, args.strict)
    if args.dataset_name == "sonnet":
        return sonnet_prompts(
            *(words, path, args.num_prompts, args.seed),
            input_len=args.input_len or args.sonnet_input_len,
            output_len=args.output_len or args.sonnet_output_len,
            prefix_len=args.sonnet_prefix_len,
        )
    if args.dataset_name == "burstgpt":
        return burstgpt_prompts(words, path, args.num_prompts, args.seed)
    if args.dataset_name == "spec_bench":
        return spec_bench_prompts(
            *(words, path, args.num_prompts, args.seed),
            output_len=args.output_len or args.spec_bench_output_len,
            category=args.spec_bench_category,
            shuffle=not args.disable_shuffle,
            bad=bad,
        )
    if args.dataset_name == "hf":
        return hub_prompts(
            *(words, path, args.num_prompts, args.seed),
            split=args.hf_split,
            subset=args.hf_subset,
            output_len=args.output_len or args.hf_output_len,
            shuffle=not args.disable_shuffle,
            bad=bad,
        )
    if args.dataset_name == "custom":
        return custom_prompts(
            words,
            path,
            args.num_prompts,
            args.seed,
            output_len=args.output_len or args.custom_output_len,
            shuffle=not args.disable_shuffle,
            bad=bad,
        )
    block = args.trace_block_size
    trace = read_timed_trace(path, block=block, limit=args.num_prompts, bad=bad)
    if not trace:
        raise bad.nothing_left()
    return trace_prompts(words, trace, args.seed, block)

"""``vllm run-batch``: answer a file of requests with a model of one's own."""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.entrypoints.cli.serve import add_serve_flags, prepare
from vllm.entrypoints.openai.operations_args import OperationsArgs
from vllm.entrypoints.openai.server_args import BatchArgs, ServerArgs
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.utils.argparse_utils import human_int

logger = init_logger(__name__)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "run-batch",
        usage="vllm run-batch -i FILE -o FILE [--model MODEL] [flags]",
        help="Answer a file of requests, OpenAI's batch format.",
        description="Answer a file of requests, OpenAI's batch format. Run again with the same "
        "files, it does what has not succeeded yet. Exit code: 1 when a line failed.",
        epilog="All flags of vllm serve are taken; those of its sockets have no effect.",
    )
    parser.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="One request a line."
    )
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="Gets one result a line."
    )
    parser.add_argument(
        "--max-concurrency",
        type=human_int,
        help="Requests handed to the engine at a time. Default: twice --max-num-seqs.",
    )
    parser.add_argument("--disable-progress-bar", action="store_true", help="Draw no progress bar.")
    add_serve_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer the file; return the exit code: 1 when a line failed, or the run was interrupted.

    Raises:
        ConfigError: A flag, a file or the model is wrong.
        VllmError: The engine cannot start.
    """
    source, target = Path(args.input_file), Path(args.output_file)
    if not source.is_file():
        raise ConfigError(f"--input-file {source}: there is no such file.")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"--output-file {target}: no file can be written there.")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"--output-file {target} is the input: give another file.")
    if args.tenants is not None:
        raise ConfigError("--tenants: a batch has its engine for itself. Leave it out.")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {args.max_concurrency} must be at least 1.")
    config, server_args = prepare(args)
    concurrency = args.max_concurrency or 2 * config.scheduler_config.max_num_seqs
    return _run_batch(config, server_args, source, target, concurrency, args.disable_progress_bar)


def _run_batch(
    config: VllmConfig,
    server_args: ServerArgs,
    source: Path,
    target: Path,
    concurrency: int,
    is_quiet: bool,
) -> int:
    """Serve on a socket that only this process knows, for as long as the batch takes."""
    # Late, as --help must not wait for these.
    import httpx  # noqa: PLC0415

    from vllm.entrypoints.batch.results import ResultFile  # noqa: PLC0415
    from vllm.entrypoints.batch.runner import BatchRunner  # noqa: PLC0415
    from vllm.entrypoints.openai.api_server import run_server  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="vllm-batch-") as folder, ResultFile(target) as results:
        uds = str(Path(folder) / "socket")
        client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(
                uds=uds, limits=httpx.Limits(max_connections=concurrency)
            ),
            base_url="http://batch",
            timeout=None,
        )
        runner = BatchRunner(client, results, concurrency, shows_progress=not is_quiet)
        is_done = False

        async def job() -> None:
            nonlocal is_done
            async with client:
                await runner.run(source)
            is_done = True

        code = run_server(config, _private(server_args, uds), job)
    state = "done" if is_done else "interrupted"
    logger.info("Batch %s: %s. Results: %s", state, runner.counts, target)
    failed = runner.counts.num_failed + runner.counts.num_bad
    return code or int(failed > 0 or not is_done)


def _private(args: ServerArgs, uds: str) -> ServerArgs:
    """Return the settings of a server for this process alone."""
    return dataclasses.replace(
        args,
        api_keys=(),
        uvicorn_log_level="warning",
        operations=OperationsArgs(uds=uds, disable_access_log=True),
        batch=BatchArgs(),
    )

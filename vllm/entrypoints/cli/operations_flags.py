"""Flags of how the server is run: sockets, TLS, logs, keep-alive."""

import argparse
from typing import Any

from vllm.entrypoints.openai.operations_args import OperationsArgs, TlsArgs
from vllm.utils.config_file import CONFIG_FLAG, CONFIG_MODEL_FLAG


def add_operations_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``make_operations_args`` reads, and ``--config``."""
    parser.add_argument(
        CONFIG_FLAG,
        metavar="FILE",
        help="A YAML file of flags (max-model-len: 4k); the command line goes before it.",
    )
    parser.add_argument(CONFIG_MODEL_FLAG, dest="config_model", help=argparse.SUPPRESS)
    group = parser.add_argument_group("operations")
    group.add_argument("--uds", metavar="PATH", help="Listen on a Unix socket, not on a port.")
    group.add_argument(
        "--root-path",
        default="",
        metavar="PATH",
        help="Path under which a proxy shows this server, such as /api/llm.",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="TLS: the certificate chain, PEM.")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="TLS: the certificate's key, PEM.")
    group.add_argument(
        "--ssl-ca-certs", metavar="FILE", help="TLS: what clients' certificates are checked with."
    )
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        metavar="{0,1,2}",
        help="TLS: 2: clients need a certificate, 1: one that is sent is checked. Default: 0.",
    )
    group.add_argument("--ssl-ciphers", default="TLSv1", help="TLS: OpenSSL's list of ciphers.")
    _add_switch(
        group, "--enable-ssl-refresh", "TLS: read certificate and key again when they change."
    )
    group.add_argument(
        "--sse-keep-alive-interval",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="Send a comment on a stream that was silent for so long. Default: 0, never.",
    )
    _add_api_server_count(group)
    group.add_argument(
        "--admin-api-key",
        metavar="KEY",
        help="The operator's key: opens everything, and it alone /reset_prefix_cache, "
        "/server_info, /cache and /v1/cache/*, which are there then.",
    )
    _add_switch(
        group,
        "--enable-per-request-metrics",
        "Tell in every completion and chat where its time went (metrics).",
    )
    _add_switch(group, "--guard-metrics", "Ask for the API key on /metrics too.")
    _add_switch(group, "--disable-uvicorn-access-log", "Log no line for each request.")
    group.add_argument(
        "--disable-access-log-for-endpoints",
        default="",
        metavar="PATHS",
        help="Log no line for requests to these paths: /health,/metrics.",
    )


def _add_api_server_count(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--api-server-count",
        "-asc",
        type=int,
        default=1,
        metavar="N",
        help="Processes that answer HTTP, all on one socket and for the same engine cores. "
        "Default: 1.",
    )


def _add_switch(group: argparse._ArgumentGroup, name: str, text: str) -> None:
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=False, help=text)


def make_operations_args(args: Any) -> OperationsArgs:
    """Take the flags out of parsed arguments.

    Raises:
        ConfigError: A value is wrong.
    """
    paths = args.disable_access_log_for_endpoints.split(",")
    return OperationsArgs(
        uds=args.uds,
        root_path=args.root_path,
        tls=TlsArgs(
            keyfile=args.ssl_keyfile,
            certfile=args.ssl_certfile,
            ca_certs=args.ssl_ca_certs,
            cert_reqs=args.ssl_cert_reqs,
            ciphers=args.ssl_ciphers,
            refresh=args.enable_ssl_refresh,
        ),
        disable_access_log=args.disable_uvicorn_access_log,
        quiet_endpoints=tuple(path.strip() for path in paths if path.strip()),
        keep_alive_s=args.sse_keep_alive_interval,
        guards_metrics=args.guard_metrics,
        api_server_count=args.api_server_count,
        admin_key=args.admin_api_key,
        shows_metrics=args.enable_per_request_metrics,
    )

# mypy: disable-error-code="import-not-found, attr-defined, no-redef"
"""The parser of vLLM's command line, which moved in 0.33."""

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.common.startup import cli_env_setup
except ModuleNotFoundError:  # vLLM 0.32
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

__all__ = ["cli_env_setup", "make_arg_parser", "validate_parsed_serve_args"]

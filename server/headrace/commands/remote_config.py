"""`headrace models config`, and configurations that are sent to a running server."""

import argparse

from google.protobuf import json_format, text_format

from headrace.client.server import Server
from headrace.commands.remote import CommandFailed, content, print_json
from headrace.core.errors import InvalidConfig
from headrace.repository.config import parse_config
from headrace.wire.pb.model_config_pb2 import ModelConfig


def show_config(options: argparse.Namespace, server: Server) -> int:
    """Print a complete configuration as a `config.pbtxt`."""
    document = server.config(options.model, options.version or "")
    if options.json:
        print_json(document)
    else:
        message = json_format.ParseDict(document, ModelConfig(), ignore_unknown_fields=True)
        print(text_format.MessageToString(message), end="")
    return 0


def config_text(given: str) -> str:
    """A configuration as JSON: inline, or from a file in either form; raises `CommandFailed`."""
    if given.lstrip().startswith("{"):
        text, name = given, "--config"
    else:
        text, name = content(given).decode("utf-8", "replace"), given
    if not text.lstrip().startswith("{"):
        try:
            return str(json_format.MessageToJson(parse_config(text, name).config, indent=None))
        except InvalidConfig as error:
            raise CommandFailed(str(error)) from None
    try:
        json_format.Parse(text, ModelConfig())
    except json_format.ParseError as error:
        raise CommandFailed(f"{name}: {str(error).replace('inference.', '')}") from None
    return text

"""`headrace consume`: inboxes without doors for clients."""

import argparse

from headrace.cli.command import Command, OptionGroup, option
from headrace.cli.serve import SERVE
from headrace.settings import OPTIONS

_OF_DOORS = ("HTTP", "gRPC")  # sections of settings begin with these


def _run(options: argparse.Namespace) -> int:
    """Serve without HTTP and gRPC; the metrics stay."""
    for setting in OPTIONS:
        if not hasattr(options, setting.field):
            setattr(options, setting.field, None)
    options.inboxes, options.allow_http, options.allow_grpc = options.file, "false", "false"
    options.files = []
    assert SERVE.run is not None
    return SERVE.run(options)


def _offered(group: OptionGroup) -> OptionGroup:
    return group._replace(options=[o for o in group.options if "--inboxes" not in o.names])


CONSUME = Command(
    name="consume",
    help="answer messages of brokers",
    description="Take messages from Kafka, NATS, Redis or RabbitMQ, run models, send the answers"
    " back. FILE declares the inboxes.",
    options=(option("file FILE", "TOML file of inboxes"), *SERVE.options[1:]),
    groups=[_offered(group) for group in SERVE.groups if not group.title.startswith(_OF_DOORS)],
    run=_run,
)

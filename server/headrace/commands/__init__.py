"""What the subcommands of `headrace` take and do, each in a module of its own; `cli` joins them."""

"""Model repositories: directory layout, `config.pbtxt`, its completion, and file changes."""

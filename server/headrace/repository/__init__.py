"""Model repositories: directory layout, `config.pbtxt`, its completion, and changes of files."""

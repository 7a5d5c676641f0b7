"""Floor 4: where models come from: the directory layout, `config.pbtxt`, and its completion."""

"""Where models come from: the directory layout, `config.pbtxt`, and its completion."""

"""What not everyone needs, each a folder that could leave: registered as plugins of others are."""

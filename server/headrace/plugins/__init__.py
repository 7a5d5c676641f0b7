"""Plugins of the server itself: optional features, each a folder registered like any plugin."""

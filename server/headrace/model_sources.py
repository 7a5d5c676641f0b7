"""Which models there are by the settings, and who may change that."""

from pathlib import Path

from headrace.engine.control import ControlMode, ControlOptions, LoadOverrides
from headrace.repository.layout import NO_SUCH, Catalogue, ModelSource, at_start, find_sources
from headrace.settings import Settings


def sources_at_start(settings: Settings) -> tuple[list[ModelSource], list[str]]:
    """The models to load at first, and what looks wrong; raises as `find_sources` does."""
    sources, warnings = find_sources(
        [Path(path) for path in settings.model_repository],
        [Path(path) for path in settings.model_file],
        settings.model_config_name,
        settings.model_namespacing,
    )
    if settings.residency is not None:
        named = at_start(sources, [*settings.pin_model, *settings.load_model])
        sources += [source for source in named if source.problem == NO_SUCH]
    elif ControlMode(settings.model_control_mode) is ControlMode.EXPLICIT:
        sources = at_start(sources, settings.load_model)
    return sources, warnings


def control_options(settings: Settings) -> ControlOptions:
    """Who decides which models are served, and what may be loaded."""
    return ControlOptions(
        ControlMode(settings.model_control_mode),
        Catalogue(
            tuple(map(Path, settings.model_repository)),
            tuple(map(Path, settings.model_file)),
            settings.model_config_name,
            settings.model_namespacing,
        ),
        LoadOverrides[settings.load_overrides.upper()],
        settings.max_override_bytes,
    )

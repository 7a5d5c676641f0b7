"""The Java virtual machine inside a worker, for libraries that bring jars."""

from pathlib import Path
from typing import Any

from headrace.plugins.loaders.tabular import needed, threads

# Signals are the worker's, cores those of its share, and no XML file names files to be read.
_OPTIONS = ("-Xrs", "-Djavax.xml.accessExternalDTD=", "-Djavax.xml.accessExternalSchema=")


def machine(library: Any) -> Any:
    """Start the machine with the jars in a library's folder; returns the module `jpype`.

    Raises `ImportError` if there is no Java, or no jar.
    """
    jpype = needed("jpype", "JPype1")
    folder = Path(library.__file__).parent
    jars = sorted(map(str, folder.rglob("*.jar")))
    if not jars:
        raise ImportError(f"{library.__name__} brings no jars in {folder.name}/: install it whole")
    if not jpype.isJVMStarted():
        cores = f"-XX:ActiveProcessorCount={threads()}"
        try:
            jpype.startJVM(*_OPTIONS, cores, classpath=jars, convertStrings=True)
        except jpype.JVMNotFoundException as error:
            raise ImportError(
                "this model needs Java, 11 or newer, and none was found: install it where the"
                " server runs (Debian: openjdk-17-jre-headless), or set JAVA_HOME"
            ) from error
    return jpype


def listed(array: Any) -> list[Any]:
    """Values of a column for Java: NaN and empty texts are missing, None."""
    return [None if value != value or value == "" else value for value in array.tolist()]

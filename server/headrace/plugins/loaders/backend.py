"""Backends for model files of libraries, without code of the model, in worker processes.

File names, which files are data and which are programs, and trust are decided here, before a worker
starts; the module of the same name beside this one, which runs in the worker, reads the file.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from headrace.core.errors import InvalidOption, LoadFailed
from headrace.core.model_spec import LoadSpec
from headrace.core.texts import flag
from headrace.placement.backend import BackendContext
from headrace.placement.choice import IN_PROCESS
from headrace.placement.loaded import Servable
from headrace.placement.worker.python_backend import PythonBackend
from headrace.placement.worker.python_options import WORKER_PARAMETERS

TRUST_PARAMETER = "trust_model_code"
_ANY = ("",)
# Parameters of any model in a worker.
_PARAMETERS = WORKER_PARAMETERS | {TRUST_PARAMETER}


@dataclass(frozen=True, slots=True)
class Format:
    """The files of one library's models.

    `filenames` are the possible names of a model's file, the preferred one first; a file with one
    of `suffixes` under another name is accepted, too. Loading a file runs its author's code unless
    its name ends with one of `data`; "" matches any. `parameters` are further configuration
    parameters.
    """

    platform: str
    filenames: tuple[str, ...]
    suffixes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    parameters: frozenset[str] = frozenset()


# By backend name, which is also the name of the loader module.
FORMATS: Mapping[str, Format] = {
    "sklearn": Format(
        "sklearn",
        ("model.skops", "model.joblib", "model.pkl"),
        (".skops", ".joblib", ".pkl"),
        (".skops",),  # whose loader refuses unknown types
        frozenset({"skops_trusted_types"}),
    ),
    "xgboost": Format("xgboost", ("model.json", "model.ubj"), (".ubj",), _ANY),
    "lightgbm": Format("lightgbm", ("model.txt",), (), _ANY),
    "catboost": Format("catboost", ("model.cbm",), (".cbm",), _ANY),
    "mlflow": Format("mlflow", ("MLmodel", "model/MLmodel")),
    "pmml": Format("pmml", ("model.pmml",), (".pmml",), _ANY),
    "mojo": Format("mojo", ("model.zip",), (".zip",), _ANY),
    "pytorch": Format("pytorch_libtorch", ("model.pt", "model.pt2"), (".pt", ".pt2")),
}


class ArtefactBackend(PythonBackend):
    """Runs the models of one library in workers."""

    ragged = None  # all rows of a batch are one matrix

    def __init__(self, name: str, trusted: bool = False) -> None:
        """`trusted` applies to all models, whatever their configurations say."""
        found = FORMATS[name]
        super().__init__(f"{__package__}.{name}", found.platform, found.filenames[0])
        self.filenames = found.filenames
        self.suffixes = found.suffixes
        self._format = found
        self._trusted = trusted

    @property
    def parameters(self) -> Set[str]:
        """The documented parameters."""
        return _PARAMETERS | self._format.parameters

    def reads_parameter(self, name: str) -> bool:
        """True for `parameters` only: there is no code of the model to read others."""
        return name in self.parameters

    def load(self, spec: LoadSpec) -> Servable:
        """Start a worker that loads the file; raises `LoadFailed` or `InvalidOption`."""
        # Libraries would change the server's settings.
        if spec.parameters.get("execution") in IN_PROCESS:
            text = "this format runs in worker processes only"
            raise InvalidOption("parameters['execution']", text)
        trusted = flag(spec.parameters, TRUST_PARAMETER) or self._trusted
        data = spec.path.name.endswith(self._format.data)
        if not data and not trusted and spec.path.is_file():
            raise LoadFailed(
                f"{spec.path.name} can run code of its author's when it is loaded. If you trust"
                f' it, say so in config.pbtxt: parameters {{ key: "{TRUST_PARAMETER}" value'
                f' {{ string_value: "true" }} }}, or start the server with --trust-model-code'
            )
        told = {"trusted": trusted, "default_max_batch_size": spec.default_max_batch_size}
        from headrace.placement.worker.loaded_worker import LoadedWorker

        return LoadedWorker(spec, self._loader, told)


def _plugin(name: str) -> Callable[[BackendContext], ArtefactBackend]:
    return lambda context: ArtefactBackend(name, context.trust_model_code)


sklearn, xgboost, lightgbm, catboost, mlflow, pmml, mojo, pytorch = map(_plugin, FORMATS)

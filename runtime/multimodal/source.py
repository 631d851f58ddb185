"""Where the encoder of images of a model is: in the model's folder, or in a GGUF file of its own.

    source = find_source(model_path, mmproj)      # None: the model takes no images
    source.family                                 # an `ImageFamily`
    source.image_processor()                      # in the process that decodes images
    source.config(), source.tensors()             # in the engine

An engine and its web process find the same source.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from ..config.multimodal_registry import family_class, family_of, find_projectors
from ..files.folder import read_json
from ..files.mmproj import mmproj_beside
from .family import ImageFamily
from .settings import check_settings, read_settings

if TYPE_CHECKING:
    from ..config.engine import EngineConfig
    from ..config.quantization_registry import Scheme
    from ..layers.linear import StoredTensor
    from .projectors.projector import Projector

logger = logging.getLogger(__name__)

INSTALL = "pip install 'piecework[vision]'"


class ImageSource(Protocol):
    """Raises `ValueError` that names what is at fault.

    Attributes:
        path: The folder or file, for messages.
        scheme: What config.json says of quantised weights.
    """

    path: Path
    family: ImageFamily

    @property
    def scheme(self) -> Scheme | None: ...

    def image_processor(self) -> Any:
        """Return transformers' image processor, by PIL, or the family's own."""
        ...

    def config(self) -> Any:
        """Return transformers' configuration of the model."""
        ...

    def tensors(self) -> Sequence[StoredTensor]:
        """Return the tensors of the encoder, among others."""
        ...


class FolderSource:
    """A model's folder."""

    def __init__(self, path: Path, module: str) -> None:
        self.path = path
        config = read_json(path / "config.json")
        with _settings_named(path):
            self.family: ImageFamily = family_class(module)(config)
            if (settings := read_settings(path)) is not None:
                check_settings(self.family, settings)

    @property
    def scheme(self) -> Scheme | None:
        from ..loader.loader import scheme_of

        return scheme_of(self.path)

    def image_processor(self) -> Any:
        return _processor_of(self.family, self.path, self.path)

    def config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.path)

    def tensors(self) -> Sequence[StoredTensor]:
        from ..loader import safetensors

        return safetensors.list_tensors(self.path, quantized=self.scheme is not None)


class MmprojSource:
    """A GGUF file with the vision tower for the text model of another GGUF file."""

    scheme = None

    def __init__(self, path: Path, model: Path) -> None:
        self.path = path
        with _damage_named(path):
            self._projector = projector = _projector(path, model)
            self.family: ImageFamily = family_class(projector.family)(projector.members())
            with _settings_named(path):
                check_settings(self.family, projector.processor())

    def image_processor(self) -> Any:
        with TemporaryDirectory() as folder, _damage_named(self.path):
            settings = json.dumps(self._projector.processor())
            Path(folder, "preprocessor_config.json").write_text(settings, encoding="utf-8")
            return _processor_of(self.family, Path(folder), self.path)

    def config(self) -> Any:
        from transformers import AutoConfig

        members = dict(self.family.config)
        with _damage_named(self.path):
            return AutoConfig.for_model(members.pop("model_type"), **members)

    def tensors(self) -> Sequence[StoredTensor]:
        with _damage_named(self.path):
            return self._projector.tensors()


def find_source(model_path: str | Path, mmproj: str | None = None) -> ImageSource | None:
    """Return the encoder of images of a model, or None if the model takes no images.

    `mmproj` is the value of --mmproj. Imports nothing heavy. Raises `ValueError` if a file cannot
    be read or does not fit the model.
    """
    path = Path(model_path)
    if path.suffix != ".gguf":
        if mmproj is not None:
            raise ValueError(
                f"--mmproj is for .gguf models, and {path} is a folder, which has its own vision "
                "tower; leave it out"
            )
        module = family_of(path)
        return None if module is None else FolderSource(path, module)
    if mmproj is not None:
        return MmprojSource(Path(mmproj).expanduser(), path)
    fitting = []
    for beside in mmproj_beside(path):
        try:
            fitting.append(MmprojSource(beside, path))
        except ValueError as error:
            logger.info("%s is not used: %s", beside, error)
    if len(fitting) > 1:
        names = ", ".join(source.path.name for source in fitting)
        raise ValueError(
            f"several vision towers beside {path} fit it ({names}); choose one with --mmproj FILE, "
            "or add --disable-vision"
        )
    return fitting[0] if fitting else None


def asked_source(path: str | Path, config: EngineConfig) -> ImageSource | None:
    """Return the encoder of images that an engine is to use, or None if its flags say none.

    Raise as `find_source`.
    """
    # Random weights have no images to see, and transformers' forward leaves them out.
    if (
        config.disable_vision
        or config.load_format == "dummy"
        or config.model_impl == "transformers"
    ):
        return None
    return find_source(path, config.mmproj)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raise `ValueError` that names the file if its metadata or tensors make no vision tower.

    Numbers of the wrong type, zeros and missing tensors raise errors of many kinds, also of
    transformers' own.
    """
    try:
        yield
    except (ValueError, ImportError, OSError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"the vision tower {path} is damaged ({reason:.200}); download it again, or add "
            "--disable-vision"
        ) from error


@contextmanager
def _settings_named(path: Path) -> Iterator[None]:
    """Raise `ValueError` that names the model if no image can be made by its settings."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:
        # Members of a wrong type raise errors of any kind.
        told = " ".join(str(error).split())
        reason = told if isinstance(error, ValueError) else f"{type(error).__name__}: {told}"
        raise ValueError(
            f"images cannot be processed as {path} says: {reason:.300}; download the model again, "
            "or add --disable-vision"
        ) from None


def _projector(path: Path, model: Path) -> Projector:
    """Open a file with a vision tower. Raise `ValueError` if it does not fit the text model."""
    # Imported here, because the gguf library imports numpy.
    from ..files.gguf_reader import metadata, open_gguf

    reader = open_gguf(path)
    kind = metadata(reader, "clip.projector_type") or metadata(reader, "clip.vision.projector_type")
    if kind is None:
        raise ValueError(f"{path} holds no vision tower (clip.projector_type); name another file")
    projectors = find_projectors()
    if kind not in projectors:
        raise ValueError(
            f"{path} holds a vision tower of the kind {kind!r:.60}, which is not supported "
            f"({', '.join(sorted(projectors))} are); add --disable-vision to serve the text alone"
        )
    module = import_module(f"{__package__}.projectors.{projectors[kind]}")
    projector: Projector = module.OfFile(reader, open_gguf(model))
    if (reason := projector.why_unfit()) is not None:
        raise ValueError(
            f"the vision tower {path} does not fit {model}: {reason}; name the file of the same "
            "model with --mmproj, or add --disable-vision"
        )
    return projector


def _processor_of(family: ImageFamily, folder: Path, named: Path) -> Any:
    """Return the image processor of a folder with preprocessor_config.json. `named` is the path
    for messages.
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ValueError(f"images need Pillow to be decoded; run: {INSTALL}") from None
    settings = read_settings(folder)
    if settings is not None and (own := family.image_processor(settings)) is not None:
        return own
    from transformers import AutoImageProcessor
    from transformers.utils.logging import set_verbosity_error

    set_verbosity_error()
    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except Exception as error:
        # Members of a wrong type raise errors of any kind.
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the image processor of {named} cannot be loaded ({reason:.200}); download the model "
            "again, or add --disable-vision"
        ) from None

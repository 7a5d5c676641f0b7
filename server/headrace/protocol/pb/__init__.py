"""The protocol's protobuf messages, kept in a descriptor pool of our own.

Client libraries register the same `inference.*` names in protobuf's default pool, which refuses a
second registration. So `scripts/protos` compiles `protos/` to one descriptor set instead of
ordinary Python modules, and the `*_pb2` modules beside this file look their classes up in `POOL`.
They are used like any other `_pb2` module, and their stubs are those of ordinary ones.

The pool is filled at import because the modules below need their classes at import. It is complete
from then on, and only read.
"""

from pathlib import Path

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message_factory import GetMessageClass


def _load(path: Path) -> DescriptorPool:
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(path.read_bytes()).file:  # imported files come first
        pool.AddSerializedFile(file.SerializeToString())
    return pool


POOL = _load(Path(__file__).with_name("descriptors.binpb"))


def publish(proto: str, namespace: dict[str, object]) -> FileDescriptor:
    """Put the top-level messages, enums and enum values of a .proto file into a module's globals.

    `proto` is the name of the file as it was compiled, such as `health.proto`.
    """
    file = POOL.FindFileByName(proto)
    for name, message in file.message_types_by_name.items():
        namespace[name] = GetMessageClass(message)
    for name, enum in file.enum_types_by_name.items():
        namespace[name] = EnumTypeWrapper(enum)
        namespace |= {value.name: value.number for value in enum.values}
    return file

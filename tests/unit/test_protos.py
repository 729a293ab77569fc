"""The checked-in generated code says what brigade.proto says, and the servicer answers all of it."""

import ast
import inspect
from pathlib import Path

import grpc_tools
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from protos import brigade_pb2, brigade_pb2_grpc
from worker.node.service import HopService, NodeService

ROOT = Path(__file__).resolve().parents[2]
PROTO = "protos/brigade.proto"
SERVICES = {"Node": NodeService, "Hop": HopService}
METHODS = [
    (servicer, method)
    for name, servicer in SERVICES.items()
    for method in brigade_pb2.DESCRIPTOR.services_by_name[name].methods
]


def compiled(source: str, folder: Path) -> FileDescriptorProto:
    """What protoc makes of this source."""
    (folder / "protos").mkdir(parents=True)
    (folder / PROTO).write_text(source, encoding="utf-8")
    include = Path(grpc_tools.__file__).parent / "_proto"
    out = folder / "set"
    assert protoc.main(["protoc", f"-I{folder}", f"-I{include}", f"--descriptor_set_out={out}", PROTO]) == 0
    return normalised(FileDescriptorSet.FromString(out.read_bytes()).file[0])


def checked_in() -> FileDescriptorProto:
    found = FileDescriptorProto()
    brigade_pb2.DESCRIPTOR.CopyToProto(found)
    return normalised(found)


def normalised(file: FileDescriptorProto) -> FileDescriptorProto:
    """Without what protoc writes only into one of the two."""
    file.ClearField("source_code_info")
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_the_generated_code_is_that_of_the_proto(tmp_path: Path) -> None:
    source = (ROOT / PROTO).read_text(encoding="utf-8")
    assert compiled(source, tmp_path / "same") == checked_in(), "run: python -m tools.generate_protos"
    for number, (old, new) in enumerate((
        ("uint32 base = 2;", "uint64 base = 2;"),
        ("uint32 base = 2;", "uint32 base = 17;"),
        ("uint32 base = 2;", "uint32 start = 2;"),
        ("repeated uint32 tokens = 4;", "uint32 tokens = 4;"),
        ("DTYPE_BFLOAT16 = 3;", "DTYPE_BFLOAT16 = 4;"),
        ("rpc Relay(stream Part)", "rpc Relay(Part)"),
    )):  # fmt: skip
        assert old in source
        assert compiled(source.replace(old, new), tmp_path / str(number)) != checked_in(), new


def test_the_stubs_for_the_type_checker_have_the_same_messages_and_fields() -> None:
    tree = ast.parse((ROOT / "protos/brigade_pb2.pyi").read_text(encoding="utf-8"))
    stubs = {
        node.name: {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}  # type: ignore[union-attr]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    for name, message in brigade_pb2.DESCRIPTOR.message_types_by_name.items():
        fields = {field.name for field in message.fields}
        assert {field for field in stubs[name] if field.islower()} == fields, name


@pytest.mark.parametrize(("servicer", "method"), METHODS, ids=[method.name for _, method in METHODS])
def test_the_servicer_implements_the_method(servicer, method) -> None:  # noqa: ANN001 - protobuf's are untyped
    ours = getattr(servicer, method.name)
    assert ours is not getattr(servicer.__base__, method.name), "only the generated refusal is there"
    # what streams may also write to its context: then it ends where it is cancelled, even in the middle of a write
    assert inspect.iscoroutinefunction(ours) or (method.server_streaming and inspect.isasyncgenfunction(ours))
    received = list(inspect.signature(ours).parameters.values())[1].annotation
    expected = method.input_type.name
    assert getattr(received, "__name__", "") == ("AsyncIterator" if method.client_streaming else expected)


@pytest.mark.parametrize("name", SERVICES)
def test_the_generated_servicer_and_stub_have_the_methods_of_the_service(name: str) -> None:
    names = {method.name for _, method in METHODS if method.containing_service.name == name}
    public = {each for each in vars(getattr(brigade_pb2_grpc, f"{name}Servicer")) if not each.startswith("_")}
    calls = ast.parse(inspect.getsource(getattr(brigade_pb2_grpc, f"{name}Stub")))
    stub = {node.attr for node in ast.walk(calls) if isinstance(node, ast.Attribute) and node.attr in names}
    assert public == stub == names


def test_every_service_is_served() -> None:
    assert set(SERVICES) == set(brigade_pb2.DESCRIPTOR.services_by_name)

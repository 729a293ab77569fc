"""The checked-in generated code says what brigade.proto says, and the servicers implement all of it."""

import ast
import inspect
from pathlib import Path
from typing import Any

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
    pytest.param(name, method, id=method.name)
    for name in SERVICES
    for method in brigade_pb2.DESCRIPTOR.services_by_name[name].methods
]


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
    include = Path(grpc_tools.__file__).parent / "_proto"

    def compiled(source: str) -> FileDescriptorProto:
        """What protoc makes of this source."""
        path, out = tmp_path / PROTO, tmp_path / "set"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
        assert protoc.main(["protoc", f"-I{tmp_path}", f"-I{include}", f"--descriptor_set_out={out}", PROTO]) == 0
        return normalised(FileDescriptorSet.FromString(out.read_bytes()).file[0])

    checked_in = FileDescriptorProto()
    brigade_pb2.DESCRIPTOR.CopyToProto(checked_in)
    normalised(checked_in)
    source = (ROOT / PROTO).read_text(encoding="utf-8")
    assert compiled(source) == checked_in, "run: python -m tools.generate_protos"
    for old, new in (
        ("uint32 base = 2;", "uint32 base = 99;"),
        ("uint32 base = 2;", "uint32 start = 2;"),
        ("repeated uint32 tokens = 4;", "uint32 tokens = 4;"),
        ("DTYPE_BFLOAT16 = 3;", "DTYPE_BFLOAT16 = 9;"),
        ("rpc Relay(stream Part)", "rpc Relay(Part)"),
    ):
        assert compiled(source.replace(old, new)) != checked_in, new


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


@pytest.mark.parametrize(("service", "method"), METHODS)
def test_the_servicer_implements_the_method_and_the_generated_code_has_it(service: str, method: Any) -> None:
    servicer = SERVICES[service]
    ours = getattr(servicer, method.name)
    assert ours is not getattr(servicer.__base__, method.name), "only the generated refusal is there"
    # what streams may also write to its context: then it ends where it is cancelled, even in the middle of a write
    assert inspect.iscoroutinefunction(ours) or (method.server_streaming and inspect.isasyncgenfunction(ours))
    received = list(inspect.signature(ours).parameters.values())[1].annotation
    expected = method.input_type.name
    assert getattr(received, "__name__", "") == ("AsyncIterator" if method.client_streaming else expected)
    assert hasattr(getattr(brigade_pb2_grpc, f"{service}Servicer"), method.name)
    assert f"self.{method.name} = " in inspect.getsource(getattr(brigade_pb2_grpc, f"{service}Stub"))


def test_every_service_is_served() -> None:
    assert set(SERVICES) == set(brigade_pb2.DESCRIPTOR.services_by_name)
